"""Ids and timestamps of the service's records."""

from __future__ import annotations

import secrets
import time


def new_id(prefix: str) -> str:
    """Return an unguessable id such as ``file-6f1c…``."""
    return f"{prefix}-{secrets.token_hex(12)}"


def now() -> int:
    """Return the current unix time in whole seconds, as in OpenAI's API."""
    return int(time.time())
