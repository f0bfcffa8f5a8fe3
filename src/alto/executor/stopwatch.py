"""Adds up the time that a task spends on each activity."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Literal

__all__ = ["Stopwatch"]


class Stopwatch:
    """Adds up the time that a task spends on each activity.

    Args:
        before_s: Seconds by activity, from before the task was interrupted.

    Attributes:
        time_s: Seconds by activity: ``training``, ``evaluation``, ``saving``.
    """

    def __init__(self, before_s: Mapping[str, float] | None = None) -> None:
        self.time_s = {"training": 0.0, "evaluation": 0.0, "saving": 0.0, **(before_s or {})}

    def add(self, what: Literal["training", "evaluation", "saving"], seconds: float) -> None:
        self.time_s[what] += seconds

    @contextlib.contextmanager
    def timing(self, what: Literal["training", "evaluation", "saving"]) -> Iterator[None]:
        """Add the time until the block is left."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.add(what, time.perf_counter() - began_s)
