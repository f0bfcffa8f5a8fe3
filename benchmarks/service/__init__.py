"""Parts of the benchmark of the service."""
