"""Observers on threads of their own, one of which hangs: waiting for it costs a test no time."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from alto.runs import background

__all__ = ["pass_time_for"]

LIMIT_S = 120.0


def pass_time_for(hanging: str, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """At the end observers are waited for by a clock that moves only while somebody waits for the one that hangs.

    Args:
        hanging: What its thread's name ends with. All others are waited for until they have ended.

    Returns:
        How long each was to be waited for, in seconds; filled as that happens.
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
