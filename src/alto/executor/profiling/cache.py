"""Profiles on disk: what was measured once is not measured again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alto.executor.profiling.measure import Measured

__all__ = ["load", "save"]


def load(key: Mapping[str, Any]) -> Measured | None:
    """What was measured under ``key``; None if nothing was, or nothing that can be read."""
    try:
        return Measured.from_dict(json.loads(_file(key).read_text(encoding="utf-8"))["measured"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save(key: Mapping[str, Any], measured: Measured) -> None:
    """Keep ``measured``; a cache that cannot be written costs the next run another measurement, and nothing else."""
    file = _file(key)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({"key": key, "measured": measured.to_dict()}, indent=2), encoding="utf-8")
        draft.replace(file)


def _file(key: Mapping[str, Any]) -> Path:
    home = os.environ.get("ALTO_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "alto"
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return Path(home) / "profiles" / f"{digest}.json"
