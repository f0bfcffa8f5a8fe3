"""Programs beside the package: they write pages and data of the project, and check ALTO beside other libraries."""

from pathlib import Path

__all__ = ["RESULTS_DIR"]

RESULTS_DIR = Path(__file__).resolve().parent / "results"
"""What the checks have found, from which pages of ``docs/`` are written."""
