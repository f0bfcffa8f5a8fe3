"""Parts of ``benchmarks/memory.py``."""
