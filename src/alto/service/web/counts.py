"""Counts of requests by route and status, and a histogram of their durations."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict

__all__ = ["RequestCounts"]

_BOUNDS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0)


class RequestCounts:
    """Counts of requests since this process started. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._within: defaultdict[float, int] = defaultdict(int)
        self._sum_s = 0.0
        self._lock = threading.Lock()

    def add(self, method: str, route: str, status: int, duration_s: float) -> None:
        """Count a request."""
        with self._lock:
            self._counts[method, route, status] += 1
            self._sum_s += duration_s
            for bound in _BOUNDS_S:
                self._within[bound] += duration_s <= bound

    def lines(self) -> list[str]:
        """Return the counts in Prometheus' text format."""
        with self._lock:
            counts, within, sum_s = dict(self._counts), dict(self._within), self._sum_s
        total = sum(counts.values())
        name = "alto_request_duration_seconds"
        return [
            "# HELP alto_requests_total Requests by route and status.",
            "# TYPE alto_requests_total counter",
            *(
                f'alto_requests_total{{method="{method}",route="{route}",status="{status}"}} {count}'
                for (method, route, status), count in sorted(counts.items())
            ),
            f"# HELP {name} Durations of requests; a stream counts until its end, not until its first byte.",
            f"# TYPE {name} histogram",
            *(f'{name}_bucket{{le="{bound:g}"}} {within.get(bound, 0)}' for bound in _BOUNDS_S),
            f'{name}_bucket{{le="+Inf"}} {total}',
            f"{name}_sum {sum_s:.6f}",
            f"{name}_count {total}",
        ]
