"""Programs of the project that are not part of the package: they write pages and data, and compare ALTO with other
libraries."""

from pathlib import Path

__all__ = ["RESULTS_DIR"]

RESULTS_DIR = Path(__file__).resolve().parent / "results"
"""Folder of the results of the checks; pages of ``docs/`` are written from them."""
