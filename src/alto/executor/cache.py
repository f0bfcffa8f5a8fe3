"""A cache on disk for measurements and reference log-probs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from alto.backbone import resolve_model
from alto.base import cache_home, read_json, replace_file
from alto.spec import is_object_name
from alto.version import version_of

Kind: TypeAlias = Literal["profiles", "threads", "estimates", "references"]
"""Kinds of entries, each in its own folder: profiles of steps, durations of steps by number of threads, estimates of
tasks, reference log-probs."""


_MAX_BYTES = 1024**3
"""Largest size of an entry in bytes; reference log-probs of a large dataset take some megabytes."""


def load(kind: Kind, key: Mapping[str, Any]) -> Any:
    """Return the entry saved under ``key``, as plain JSON values; None if there is none. Delete it if it is damaged."""
    try:
        measured = read_json(_file(kind, key), _MAX_BYTES)["measured"]
        if measured is None:
            raise ValueError("nothing measured")
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None  # another user's file, which may be intact
    except (OSError, ValueError, LookupError, TypeError) as error:
        discard(kind, key, error)
        return None
    return measured


def discard(kind: Kind, key: Mapping[str, Any], why: object) -> None:
    """Delete the damaged entry of ``key`` and warn with the name of its file. ``why`` says in the warning what is
    damaged."""
    file = _file(kind, key)
    warnings.warn(f"{file} is damaged ({why!s:.200}); it is discarded, and measured again", stacklevel=2)
    with contextlib.suppress(OSError):
        shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink()


def save(kind: Kind, key: Mapping[str, Any], measured: Any) -> None:
    """Save ``measured`` under ``key``. If the cache cannot be written, the next run measures again.

    Args:
        key: Everything that the measurement depends on, as JSON values.
    """
    file = _file(kind, key)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps({"key": key, "measured": measured}, indent=2))


def revise(kind: Kind, name: str, change: Callable[[Any], Any]) -> None:
    """Replace an entry by the result of ``change``. Do nothing if the entry is gone or cannot be written.

    Args:
        name: Name of the entry, from :func:`name_of`.
        change: Takes the measurement and returns the new one, as JSON values; None leaves the entry unchanged.
    """
    file = cache_home() / kind / f"{name}.json"
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        entry = read_json(file, _MAX_BYTES)
        measured = change(entry["measured"])
        if measured is not None:
            replace_file(file, json.dumps({"key": entry["key"], "measured": measured}, indent=2))


def name_of(key: Mapping[str, Any]) -> str:
    """Return the name of the entry that is saved under ``key``."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]


def versions() -> dict[str, str | None]:
    """Return versions of the packages that affect results and speed of a base model; None for one that is not
    installed."""
    return {name: version_of(name) for name in ("alto-lora", "torch", "transformers", "bitsandbytes")}


def weights_of(model: str) -> list[tuple[str, int, int]]:
    """Return names, sizes and modification times of a local model's files; empty for a hub id, and for a model that was
    given as an object and has no files."""
    if is_object_name(model):
        return []
    folder = Path(resolve_model(model))
    if not folder.is_dir():
        return []
    files = sorted(path for path in folder.iterdir() if path.suffix in {".json", ".safetensors", ".bin", ".py"})
    return [(path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files]


def _file(kind: Kind, key: Mapping[str, Any]) -> Path:
    return cache_home() / kind / f"{name_of(key)}.json"
