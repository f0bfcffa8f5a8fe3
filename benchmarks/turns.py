"""Ways of doing the same thing take turns, so that a slow minute of the machine hits all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

__all__ = ["Round", "by_turns", "median_seconds"]

Round = Mapping[str, tuple[Any, float]]
"""What each way gave, by name, and the seconds that it took."""


def by_turns(ways: Mapping[str, Callable[[], Any]], repeats: int) -> Iterator[Round]:
    """Rounds in which every way has its turn; in every other one they go in reverse order."""
    for number in range(repeats):
        found = {}
        for name in reversed(ways) if number % 2 else ways:
            began = time.perf_counter()
            value = ways[name]()
            found[name] = value, time.perf_counter() - began
        yield {name: found[name] for name in ways}


def median_seconds(rounds: Sequence[Round]) -> dict[str, float]:
    """Of each way, by name."""
    return {name: statistics.median(found[name][1] for found in rounds) for name in rounds[0]}
