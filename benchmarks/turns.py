"""Lets several ways of doing the same work take turns, so that a slow minute of the machine affects all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

__all__ = ["Round", "by_turns", "median_seconds"]

Round = Mapping[str, tuple[Any, float]]
"""Result of each way, by name, and its seconds."""


def by_turns(ways: Mapping[str, Callable[[], Any]], repeats: int) -> Iterator[Round]:
    """Yield rounds in which every way has its turn; every other round is in reverse order."""
    for number in range(repeats):
        found = {}
        for name in reversed(ways) if number % 2 else ways:
            began = time.perf_counter()
            value = ways[name]()
            found[name] = value, time.perf_counter() - began
        yield {name: found[name] for name in ways}


def median_seconds(rounds: Sequence[Round]) -> dict[str, float]:
    """Return the median seconds of each way, by name."""
    return {name: statistics.median(found[name][1] for found in rounds) for name in rounds[0]}
