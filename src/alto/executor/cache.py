"""What was measured once, on disk, so that it is not measured again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from alto.backbone import resolve_model
from alto.runs import cache_home, replace_file
from alto.spec.outside import read_json
from alto.version import version_of

__all__ = ["Kind", "discard", "load", "save", "versions", "weights_of"]

Kind: TypeAlias = Literal["profiles", "durations", "references"]
"""Of what is kept, each in a folder of its own: profiles of steps, durations of tasks, what bases give replies."""


_MAX_BYTES = 1024**3
"""Of an entry; what a base gives a large dataset of pairs has some megabytes."""


def load(kind: Kind, key: Mapping[str, Any]) -> Any:
    """What was saved under ``key``, as JSON has it; None if nothing was. What cannot be read is discarded."""
    try:
        measured = read_json(_file(kind, key), _MAX_BYTES)["measured"]
        if measured is None:
            raise ValueError("nothing measured")
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None  # another user's, perhaps whole
    except (OSError, ValueError, LookupError, TypeError) as error:
        discard(kind, key, error)
        return None
    return measured


def discard(kind: Kind, key: Mapping[str, Any], why: object) -> None:
    """Remove what was saved under ``key`` and cannot be it, with a warning that names the file.

    Args:
        kind: Of what is kept.
        key: As it was saved under.
        why: What is wrong with it, for the warning.
    """
    file = _file(kind, key)
    warnings.warn(f"{file} is damaged ({why!s:.200}); it is discarded, and measured again", stacklevel=2)
    with contextlib.suppress(OSError):
        shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink()


def save(kind: Kind, key: Mapping[str, Any], measured: Any) -> None:
    """Keep ``measured``; a cache that cannot be written costs the next run another measurement, and nothing else.

    Args:
        kind: Of what is kept.
        key: Everything that it depends on, in values that JSON can hold.
        measured: In values that JSON can hold.
    """
    file = _file(kind, key)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps({"key": key, "measured": measured}, indent=2))


def versions() -> dict[str, str | None]:
    """Of the packages on which it depends what a base gives, and how fast; None where one is not installed."""
    return {name: version_of(name) for name in ("alto-lora", "torch", "transformers", "bitsandbytes")}


def weights_of(model: str) -> list[tuple[str, int, int]]:
    """Names, sizes and times of the files of a local model, which another may replace; nothing of a hub id."""
    folder = Path(resolve_model(model))
    if not folder.is_dir():
        return []
    files = sorted(path for path in folder.iterdir() if path.suffix in {".json", ".safetensors", ".bin", ".py"})
    return [(path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files]


def _file(kind: Kind, key: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return cache_home() / kind / f"{digest}.json"
