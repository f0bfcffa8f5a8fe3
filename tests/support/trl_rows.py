"""Rows as TRL prepares them: the oracle of ``benchmarks/templates.py``, for the tests of ``alto.data``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from templates_lib.trl_rows import trl_row

__all__ = ["trl_row"]
