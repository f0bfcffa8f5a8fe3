"""Measurements of ALTO's cost and benefit, compared with the tools that people use today. ``python -m
benchmarks.paper`` runs them."""
