"""CPU threads: the fastest number of them for a step, and the durations kept for every base model."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator, Sequence

import torch

from alto.base import is_number
from alto.executor import cache
from alto.records import ThreadTime

_FASTER = 0.95
"""A duration counts as shorter if it is less than this fraction of another. Durations of equal steps differ by less
than 5 %."""


def thread_counts(available: int) -> list[int]:
    """Return the numbers of threads that are compared: all, half of them, a quarter, down to one."""
    return [available >> power for power in range(available.bit_length())]


def fastest(times: Sequence[ThreadTime]) -> ThreadTime:
    """Return the time to use: the first one, with all threads, unless a later one is clearly shorter than the best
    before."""
    best = times[0]
    for time in times[1:]:
        if time.duration_s < _FASTER * best.duration_s:
            best = time
    return best


@contextlib.contextmanager
def using_threads(num_threads: int | None) -> Iterator[None]:
    """Limit torch to ``num_threads`` CPU threads within the block; None sets no limit."""
    before = torch.get_num_threads()
    if num_threads is None or num_threads >= before:
        yield
        return
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_thread_times(model: str, times: Sequence[ThreadTime]) -> None:
    """Write the times of a step on a base model to the cache, for :func:`kept_thread_times`."""
    cache.save("threads", _key(model, times[0].num_threads), [[time.num_threads, time.duration_s] for time in times])


def kept_thread_times(model: str, available: int) -> tuple[ThreadTime, ...]:
    """Return the cached times of a step on a base model, with ``available`` threads and with fewer; empty if there are
    none."""
    key = _key(model, available)
    found = cache.load("threads", key)
    try:
        times = tuple(ThreadTime(num_threads=number, duration_s=seconds) for number, seconds in found or ())
        if not all(is_number(time.duration_s, least=1e-9, most=1e9) for time in times):
            raise ValueError(f"invalid times: {found!r:.40}")
        if [time.num_threads for time in times] != thread_counts(available)[: len(times)]:
            raise ValueError(f"invalid numbers of threads: {found!r:.40}")
    except (TypeError, ValueError) as error:
        cache.discard("threads", key, error)
        return ()
    return times


def _key(model: str, available: int) -> dict[str, object]:
    return {
        "model": model,
        "weights": cache.weights_of(model),
        "machine": platform.processor() or platform.machine(),
        "threads": available,
        "versions": cache.versions(),
    }
