"""Benchmarks are scripts beside the package; their folder is what ``python benchmarks/<topic>.py`` imports from."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
