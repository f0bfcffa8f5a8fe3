"""The folder of what ALTO keeps for its user beside runs."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_home"]


def cache_home() -> Path:
    """``$ALTO_CACHE``, or ``alto`` in the user's cache."""
    given = os.environ.get("ALTO_CACHE")
    return Path(given or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "alto")
