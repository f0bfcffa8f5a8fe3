"""Rows of datasets: read from JSON lines, and written for the systems that are compared, so that all read the same."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["read_rows", "write_rows"]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines, which may be compressed (``.gz``)."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """Write ``rows`` as JSON lines; returns the path as tasks take it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)
