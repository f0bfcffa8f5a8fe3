"""Long measurements in parts, which are not measured again after a kill, and the facts that distinguish
measurements."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.common import machine_info, package_versions, source_digest, strict_json, write_file

__all__ = ["Part", "forget_parts", "measured_rows", "origin"]


def origin(inputs: Iterable[Path | str] = ()) -> dict[str, Any]:
    """Return the origin of a measurement: source, machine, packages and inputs, as values of strict JSON.

    Args:
        inputs: Files and folders, whose contents count; other names, such as hub ids, count as they are.
    """
    found: dict[str, Any] = json.loads(
        strict_json(
            {
                "source": source_digest(),
                "machine": machine_info(),
                "versions": package_versions(),
                "inputs": [_input_digest(one) for one in inputs],
            }
        )
    )
    return found


def _input_digest(named: Path | str) -> str:
    """Return the SHA-256 of a file or of all files of a folder; any other name is its own digest."""
    path = Path(named)
    if not path.exists():
        return str(named)
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            found = file.stat()
            digest.update(f"{file.relative_to(path.parent).as_posix()}\0".encode())
            digest.update(_content_digest(file, found.st_size, found.st_mtime_ns))
    return digest.hexdigest()


@cache
def _content_digest(file: Path, size: int, changed_ns: int) -> bytes:
    """Return the digest of a file in its present state, cached so that the weights of a large model are read once."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a long measurement.

    Attributes:
        measure: Function of an empty folder that returns rows and faults.
        inputs: See :func:`origin`.
    """

    measure: Callable[[Path], tuple[Sequence[Mapping[str, Any]], Sequence[str]]]
    inputs: tuple[Path | str, ...]


def measured_rows(folder: Path, parts: Mapping[str, Part]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return the rows of all parts of a long measurement, and the faults, as phrases that begin with the part.

    A part without faults is kept beside the results, so that it is not measured again after a kill.

    Args:
        folder: Folder of results.
        parts: Parts by names that no other measurement uses.
    """
    rows, failures = list[Mapping[str, Any]](), list[str]()
    for name, part in parts.items():
        found = _kept_rows(folder, name, part)
        if found is None:
            with tempfile.TemporaryDirectory() as scratch:
                found, wrong = part.measure(Path(scratch))
            failures += [f"{name}: {failure}" for failure in wrong]
            if not wrong:
                write_file(_part_file(folder, name), strict_json({"origin": origin(part.inputs), "rows": list(found)}))
        rows += found
    return rows, failures


def forget_parts(folder: Path, names: Iterable[str]) -> None:
    """Remove kept parts: they are in a result, and are measured anew the next time."""
    for name in names:
        _part_file(folder, name).unlink(missing_ok=True)


def _kept_rows(folder: Path, name: str, part: Part) -> Sequence[Mapping[str, Any]] | None:
    """Return the rows of a part that was measured with this source, machine, set of packages and inputs; None
    otherwise."""
    try:
        found = json.loads(_part_file(folder, name).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    rows: list[dict[str, Any]] = found["rows"]
    return rows if found["origin"] == origin(part.inputs) else None


def _part_file(folder: Path, name: str) -> Path:
    return folder / ".paper" / f"{name}.json"
