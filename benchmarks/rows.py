"""Rows of datasets: read from JSON lines, and written for the systems that are compared, so that all read the same."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from alto.errors import DataFileNotFoundError, DataFormatError

__all__ = ["read_rows", "write_rows"]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines, which may be compressed (``.gz``).

    Raises:
        DataFileNotFoundError: There is no such file.
        DataFormatError: A line is not a JSON object.
    """
    if not path.is_file():
        found = "a folder" if path.is_dir() else "nothing"
        raise DataFileNotFoundError(
            f"dataset: expected a file of JSON lines at {path}, found {found}; correct the path"
        )
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        return [_row(line, path, number) for number, line in enumerate(lines, start=1) if line.strip()]


def _row(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise DataFormatError(f"{path}:{number}: expected a JSON object, found {line.strip()[:60]!r}; mend the line")
    return row


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """Write ``rows`` as JSON lines, and return the path in the form that tasks take."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)
