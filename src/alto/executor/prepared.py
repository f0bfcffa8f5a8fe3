"""What the micro-batches of the next step read, made on the host while the device computes the present step."""

from __future__ import annotations

from collections.abc import Sequence

from alto.data import JobRows, TokenBatch
from alto.kernels import TokenSchedule

__all__ = ["PreparedStep"]


class PreparedStep:
    """Batches and schedules of the micro-batches that are expected next, found by what they are made from.

    A step that turns out otherwise (a job ended, memory ran out and the micro-batches are smaller) finds nothing here
    and makes its own: what is computed never depends on what was prepared.
    """

    def __init__(self) -> None:
        # A key holds the identity of datasets; the parts beside it keep them, so that no other takes their identity.
        self._batches: dict[tuple[tuple[int, JobRows], ...], tuple[tuple[JobRows, ...], TokenBatch]] = {}
        self._schedules: dict[TokenSchedule, TokenSchedule] = {}
        self._last: TokenSchedule | None = None

    def add(self, parts: Sequence[JobRows], batch: TokenBatch, schedule: TokenSchedule) -> None:
        """Keep what a micro-batch reads. ``schedule`` is copied at once to where that of the last micro-batch was
        copied."""
        if self._last is not None:
            schedule.copy_as(self._last)
        self._batches[_key(parts)] = (tuple(parts), batch)
        self._schedules[schedule] = schedule

    def forget(self) -> None:
        """Forget all that was prepared."""
        self._batches, self._schedules = {}, {}

    def batch(self, parts: Sequence[JobRows]) -> TokenBatch | None:
        """The batch of a micro-batch; None where it was not prepared. Given once."""
        prepared = self._batches.pop(_key(parts), None)
        return None if prepared is None else prepared[1]

    def schedule(self, schedule: TokenSchedule) -> TokenSchedule:
        """The prepared schedule that equals this one, with what was copied to devices; itself where there is none."""
        self._last = self._schedules.pop(schedule, schedule)
        return self._last


def _key(parts: Sequence[JobRows]) -> tuple[tuple[int, JobRows], ...]:
    return tuple((id(part.dataset), part) for part in parts)
