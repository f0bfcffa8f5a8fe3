"""The evaluation of the ALTO paper (arXiv 2604.05426) as commands: ``python -m benchmarks.paper NAME``."""
