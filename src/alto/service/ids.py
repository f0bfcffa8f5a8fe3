"""Identifiers and times of what the service keeps."""

from __future__ import annotations

import secrets
import time

__all__ = ["new_id", "now"]


def new_id(prefix: str) -> str:
    """An identifier that nobody can guess, such as ``file-6f1c…``."""
    return f"{prefix}-{secrets.token_hex(12)}"


def now() -> int:
    """Seconds since 1970, whole as in OpenAI's API."""
    return int(time.time())
