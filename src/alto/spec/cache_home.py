"""The user's cache folder, for files that do not belong to a run."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_home"]


def cache_home() -> Path:
    """Return ``$ALTO_CACHE``, or ``alto`` in the user's cache folder (``$XDG_CACHE_HOME`` or ``~/.cache``)."""
    given = os.environ.get("ALTO_CACHE")
    return Path(given or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "alto")
