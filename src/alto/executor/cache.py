"""What was measured once, on disk, so that it is not measured again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TypeAlias

from alto.backbone import resolve_model

__all__ = ["Kind", "load", "save", "versions", "weights_of"]

Kind: TypeAlias = Literal["profiles", "durations", "references"]
"""Of what is kept, each in a folder of its own: profiles of steps, durations of tasks, what bases give replies."""


def load(kind: Kind, key: Mapping[str, Any]) -> Any:
    """What was saved under ``key``, as JSON has it; None if nothing was, or nothing that can be read."""
    try:
        return json.loads(_file(kind, key).read_text(encoding="utf-8"))["measured"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save(kind: Kind, key: Mapping[str, Any], measured: Any) -> None:
    """Keep ``measured``; a cache that cannot be written costs the next run another measurement, and nothing else."""
    file = _file(kind, key)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({"key": key, "measured": measured}, indent=2), encoding="utf-8")
        draft.replace(file)


def versions() -> dict[str, str | None]:
    """Of the packages on which it depends what a base gives, and how fast; None where one is not installed."""
    return {name: _version(name) for name in ("alto-lora", "torch", "transformers", "bitsandbytes")}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def weights_of(model: str) -> list[tuple[str, int, int]]:
    """Names, sizes and times of the files of a local model, which another may replace; nothing of a hub id."""
    folder = Path(resolve_model(model))
    if not folder.is_dir():
        return []
    files = sorted(path for path in folder.iterdir() if path.suffix in {".json", ".safetensors", ".bin", ".py"})
    return [(path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files]


def _file(kind: Kind, key: Mapping[str, Any]) -> Path:
    home = os.environ.get("ALTO_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "alto"
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return Path(home) / kind / f"{digest}.json"
