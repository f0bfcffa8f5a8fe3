"""Long measurements in parts, which a killed run does not measure again, and what tells measurements apart."""

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
    """What a measurement is of: source, machine, packages and inputs, as strict JSON has them.

    Args:
        inputs: Files and folders, of which the contents count; other names, such as those of the hub, stand for
            themselves.
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
    """SHA-256 of a file or of all files of a folder; another name is its own digest."""
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
    """Of a file as it is; the weights of a large model are read once."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a long measurement.

    Attributes:
        measure: Called with an empty folder; gives rows, and what is wrong.
        inputs: As of :func:`origin`.
    """

    measure: Callable[[Path], tuple[Sequence[Mapping[str, Any]], Sequence[str]]]
    inputs: tuple[Path | str, ...]


def measured_rows(folder: Path, parts: Mapping[str, Part]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The rows of all parts of a long measurement, and what is wrong with them, as phrases that begin with the part.

    A part with nothing wrong is kept beside the results: a run that is killed does not measure it again.

    Args:
        folder: Of results.
        parts: By a name that no other measurement has.
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
    """Forget parts that were kept: they stand in a result, and are measured anew the next time."""
    for name in names:
        _part_file(folder, name).unlink(missing_ok=True)


def _kept_rows(folder: Path, name: str, part: Part) -> Sequence[Mapping[str, Any]] | None:
    """Those of a part that was measured of this source, machine, set of packages and inputs; else None."""
    try:
        found = json.loads(_part_file(folder, name).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    rows: list[dict[str, Any]] = found["rows"]
    return rows if found["origin"] == origin(part.inputs) else None


def _part_file(folder: Path, name: str) -> Path:
    return folder / ".paper" / f"{name}.json"
