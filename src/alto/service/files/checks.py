"""Checks of an uploaded fine-tuning file: every line must be a JSON object."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

_MAX_LINE_BYTES = 16 * 2**20
_MOST_FAULTS = 20
_CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The result of checking a file.

    Attributes:
        num_rows: Number of lines that are not empty.
        fault: Error message with line numbers; empty if there is no error.
    """

    num_bytes: int
    sha256: str
    num_rows: int
    fault: str = ""


def sha256_of(file: BinaryIO) -> str:
    """Return the SHA-256 of a file's content as hexadecimal digits; the file is left at its end."""
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def check_rows(file: BinaryIO) -> Checked:
    """Check the rows of a file, which must be at its beginning and is left at its end.

    Whether the rows have the form that a task needs is checked later, with the task.
    """
    digest, num_bytes, num_rows, faults = hashlib.sha256(), 0, 0, list[str]()
    num_faulty = 0
    for number, line in _lines(file):
        digest.update(line)
        num_bytes += len(line)
        fault = _fault_of(line, is_first=number == 1)
        if fault is None:
            continue
        num_rows += 1
        if fault:
            num_faulty += 1
            if len(faults) < _MOST_FAULTS:
                faults.append(f"line {number}: {fault}")
    message = ""
    if num_faulty:
        more = f"; and {num_faulty - len(faults)} more" if num_faulty > len(faults) else ""
        message = (
            f"expected a JSON object in every line, found {num_faulty} of {num_rows} lines without one: "
            f"{'; '.join(faults)}{more}; correct them and upload the file again"
        )
    elif not num_rows:
        message = "expected rows, one JSON object per line, found none; upload the file again with its content"
    return Checked(num_bytes=num_bytes, sha256=digest.hexdigest(), num_rows=num_rows, fault=message)


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield lines with their numbers; the pieces of a line that is too long have the same number."""
    number, is_new = 0, True
    while line := file.readline(_MAX_LINE_BYTES):
        number += is_new
        is_new = line.endswith(b"\n")
        yield number, line


def _fault_of(line: bytes, *, is_first: bool) -> str | None:
    """Return what is wrong with a line; an empty text if nothing is, None for an empty line."""
    if not line.endswith(b"\n") and len(line) >= _MAX_LINE_BYTES:
        return f"longer than {_MAX_LINE_BYTES // 2**20} MiB"
    try:
        text = line.decode("utf-8-sig" if is_first else "utf-8").strip()
    except UnicodeDecodeError:
        return "not in UTF-8"
    if not text:
        return None
    try:
        row = json.loads(text)
    except RecursionError:
        return "nested too deeply"
    except ValueError as error:
        return f"not JSON ({error})"
    return "" if isinstance(row, dict) else f"a {type(row).__name__} instead of an object"
