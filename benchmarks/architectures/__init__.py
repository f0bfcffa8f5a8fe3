"""Parts of ``benchmarks/architectures.py``."""
