"""What the benchmark of the service is made of."""
