"""Work per second of a run, from counts of the work done."""

from __future__ import annotations

from collections import deque

__all__ = ["Pace"]

WINDOW_S = 180.0


class Pace:
    """Work per second over the last minutes, from a count that only grows while the clock goes forward."""

    def __init__(self, *, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, float]] = deque()

    def note(self, time: float, count: float) -> None:
        """Record that ``count`` work was done at ``time`` (unix seconds); a decrease of either restarts the
        measurement."""
        points = self._points
        if points and (time < points[-1][0] or count < points[-1][1]):
            points.clear()
        points.append((time, count))
        # Keep the newest point before the window: it is the start of the measurement.
        while len(points) > 2 and points[1][0] <= time - self._window_s:
            points.popleft()

    def per_second(self, now: float) -> float | None:
        """Return the work per second up to ``now``; None until some work was seen."""
        if not self._points:
            return None
        (first_time, first_count), (last_time, last_count) = self._points[0], self._points[-1]
        elapsed_s = max(now, last_time) - first_time
        return (last_count - first_count) / elapsed_s if last_count > first_count and elapsed_s > 0 else None
