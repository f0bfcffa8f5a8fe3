"""Observers on their own threads, one of which hangs; waiting for it takes a test no time."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from alto.runs import background

__all__ = ["pass_time_for"]

LIMIT_S = 120.0


def pass_time_for(hanging: str, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let observers at the end be waited for by a clock that moves only while the hanging one is waited for.

    Args:
        hanging: End of the name of its thread. All others are waited for until they have ended.

    Returns:
        Seconds for which each was to be waited for; filled as that happens.
    """
    now_s, waits_s = 100.0, list[float]()
    join = threading.Thread.join

    def waits(thread: threading.Thread, timeout: float | None = None) -> None:
        nonlocal now_s
        if not thread.name.startswith(("alto-observer ", "alto-tracker ")) or timeout is None:
            join(thread, timeout)
            return
        waits_s.append(timeout)
        if thread.name.endswith(hanging):
            now_s += timeout
        else:
            join(thread, LIMIT_S)

    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(threading.Thread, "join", waits)
    return waits_s
