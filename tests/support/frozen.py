"""The files of a run, without times, ids and the last bits of numbers, for comparison with a recording.

``ALTO_RECORD_FROZEN=1 pytest --all tests/project/test_frozen.py`` writes the recordings anew.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from html_pages import Page
from safetensors.torch import load_file

__all__ = ["check_frozen", "frozen_json", "frozen_run"]

FOLDER = Path(__file__).parents[1] / "frozen"

TOLERANCE = 1e-3
"""Relative tolerance between numbers: machines round differently, and training amplifies the difference."""

TIMES = re.compile(r"(^|_)(time|date|duration|at|s|seconds|ms|until)$|_per_(second|s)$")
"""Keys of times."""

OF_MACHINE = frozenset(
    {
        *("bytes", "capacity_bytes", "disk_bytes", "disk_free_bytes", "num_bytes", "peak_bytes"),
        *("created", "device", "etag", "hostname", "lease", "pid", "port", "process", "profile", "threads", "token"),
        *("version", "versions"),
    }
)
"""Keys of values that differ between machines, versions and runs."""

IDS = re.compile(r"\b[0-9a-f]{8,64}\b|\b(?:ftjob|file|ftckpt|ftevent|model|exp|task)-[0-9A-Za-z]{6,}\b")
FOLDERS = re.compile(r"/(?:[\w.+-]+/)+")
DATES = re.compile(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d| UTC)?)?")
NUMBERS = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")
DURATIONS = re.compile(r"\bN (?:min|h)(?: N (?:s|min))?\b")
"""Durations of a minute or more, as :func:`alto.views.wording.format_duration` writes them, without their numbers."""


def check_frozen(name: str, found: Any) -> None:
    """Compare with the recording ``name``, or write it if the environment requests that."""
    path = FOLDER / f"{name}.json"
    text = json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    if os.environ.get("ALTO_RECORD_FROZEN") == "1":
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    recorded = json.loads(path.read_text(encoding="utf-8"))
    differences = list(_differences(name, recorded, json.loads(text)))
    assert not differences, "\n".join(differences[:20])


def frozen_run(root: Path) -> dict[str, Any]:
    """Return the journal of a run, its files, its best adapter and the text of its report."""
    journal = [json.loads(line) for line in (root / "journal.jsonl").read_text(encoding="utf-8").splitlines()]
    best = root / "best"
    return {
        "journal": [frozen_json(event, root) for event in journal],
        "files": sorted(IDS.sub("ID", path.relative_to(root).as_posix()) for path in root.rglob("*") if path.is_file()),
        "adapter": _frozen_adapter(best) if best.is_dir() else None,
        "report": _frozen_text(Page((root / "report.html").read_text(encoding="utf-8")).text, root),
    }


def frozen_json(value: Any, root: Path, key: str = "") -> Any:
    """Return ``value`` with masks in place of times, ids, paths and values that differ between machines."""
    if isinstance(value, dict):
        return {
            _mask(name, root): "MASKED" if name in OF_MACHINE or TIMES.search(name) else frozen_json(inner, root, name)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [frozen_json(inner, root, key) for inner in value]
    if isinstance(value, int) and value > 10**12:  # nanoseconds
        return "MASKED"
    return _mask(value, root) if isinstance(value, str) else value


def _frozen_adapter(folder: Path) -> dict[str, Any]:
    tensors = load_file(folder / "adapter_model.safetensors")
    return {
        "config": frozen_json(json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")), folder),
        "metrics": frozen_json(json.loads((folder / "metrics.json").read_text(encoding="utf-8")), folder),
        "card": _frozen_text((folder / "README.md").read_text(encoding="utf-8"), folder),
        "tensors": {
            name: [str(tensor.dtype), list(tensor.shape), float(tensor.float().norm())]
            for name, tensor in tensors.items()
        },
    }


def _frozen_text(text: str, root: Path) -> list[str]:
    """Return the lines of a text for readers, without its numbers, because times are among them."""
    lines = (" ".join(NUMBERS.sub("N", _mask(line, root)).split()) for line in text.splitlines())
    return [DURATIONS.sub("N s", line) for line in lines if line]


def _mask(text: str, root: Path) -> str:
    return DATES.sub("DATE", IDS.sub("ID", FOLDERS.sub("FOLDER/", text.replace(str(root), "RUN"))))


def _differences(place: str, recorded: Any, found: Any) -> Iterator[str]:
    if isinstance(recorded, dict) and isinstance(found, dict):
        for key in sorted({*recorded, *found}):
            if key not in recorded or key not in found:
                yield f"{place}.{key}: only in {'the recording' if key in recorded else 'what was found'}"
            else:
                yield from _differences(f"{place}.{key}", recorded[key], found[key])
    elif isinstance(recorded, list) and isinstance(found, list):
        if len(recorded) != len(found):
            yield f"{place}: {len(recorded)} recorded, {len(found)} found"
        for number, (one, other) in enumerate(zip(recorded, found, strict=False)):
            yield from _differences(f"{place}[{number}]", one, other)
    elif isinstance(recorded, float) and isinstance(found, float | int):
        if not (math.isclose(recorded, found, rel_tol=TOLERANCE, abs_tol=1e-6) or recorded != recorded != found):
            yield f"{place}: recorded {recorded}, found {found}"
    elif recorded != found:
        yield f"{place}: recorded {recorded!r:.200}, found {found!r:.200}"
