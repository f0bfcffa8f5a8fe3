"""The batches and schedules of the next step's micro-batches, made on the host while the device computes the present
step."""

from __future__ import annotations

from collections.abc import Sequence

from alto.data import JobRows, TokenBatch
from alto.kernels import TokenSchedule

__all__ = ["PreparedStep"]


class PreparedStep:
    """Batches and schedules of the micro-batches that are expected next, found by their inputs.

    If a step turns out differently (a job ended, or memory ran out and the micro-batches are smaller), it finds nothing
    here and makes its own. The computed values never depend on what was prepared.
    """

    def __init__(self) -> None:
        # Keys contain ids of datasets; the stored parts keep the datasets alive, so that no other object gets their id.
        self._batches: dict[tuple[tuple[int, JobRows], ...], tuple[tuple[JobRows, ...], TokenBatch]] = {}
        self._schedules: dict[TokenSchedule, TokenSchedule] = {}
        self._last: TokenSchedule | None = None

    def add(self, parts: Sequence[JobRows], batch: TokenBatch, schedule: TokenSchedule) -> None:
        """Keep the batch and the schedule of a micro-batch. ``schedule`` is copied at once to the devices that the last
        used schedule was copied to."""
        if self._last is not None:
            schedule.copy_as(self._last)
        self._batches[_key(parts)] = (tuple(parts), batch)
        self._schedules[schedule] = schedule

    def forget(self) -> None:
        """Forget everything that was prepared."""
        self._batches, self._schedules = {}, {}

    def batch(self, parts: Sequence[JobRows]) -> TokenBatch | None:
        """Return the batch of a micro-batch, once; None if it was not prepared."""
        prepared = self._batches.pop(_key(parts), None)
        return None if prepared is None else prepared[1]

    def schedule(self, schedule: TokenSchedule) -> TokenSchedule:
        """Return the prepared schedule that equals this one, with its copies on devices; if there is none, return
        ``schedule``."""
        self._last = self._schedules.pop(schedule, schedule)
        return self._last


def _key(parts: Sequence[JobRows]) -> tuple[tuple[int, JobRows], ...]:
    return tuple((id(part.dataset), part) for part in parts)
