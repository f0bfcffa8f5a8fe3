"""Limits on the rate of requests."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from alto.service.errors import TooManyRequestsError

__all__ = ["RateLimiter"]

_BURST_S = 5.0
_MOST_BUCKETS = 10_000


class RateLimiter:
    """A token bucket for each tenant. It fills at the tenant's rate and holds up to five seconds' worth of tokens.

    Args:
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, name: str, requests_per_s: float | None) -> None:
        """Take a token from the bucket ``name``; a rate of None means unlimited.

        Raises:
            TooManyRequestsError: The bucket is empty; the error says when to try again.
        """
        if requests_per_s is None:
            return
        now, most = self._clock(), max(1.0, _BURST_S * requests_per_s)
        with self._lock:
            tokens, since = self._buckets.pop(name, (most, now))
            tokens = min(most, tokens + (now - since) * requests_per_s)
            has_one = tokens >= 1.0
            self._buckets[name] = (tokens - has_one, now)
            if len(self._buckets) > _MOST_BUCKETS:
                self._buckets.popitem(last=False)
        if not has_one:
            wait_s = min(60, max(1, math.ceil((1.0 - tokens) / requests_per_s)))
            raise TooManyRequestsError(
                f"expected at most {requests_per_s:g} requests a second, found more; try again in {wait_s} s",
                wait_s=wait_s,
            )
