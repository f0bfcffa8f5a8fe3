"""What ``benchmarks/dpo.py`` is made of."""
