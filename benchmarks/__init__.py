"""Measurements: what ALTO takes and gives, beside what people use today. `python -m benchmarks.paper` runs them."""
