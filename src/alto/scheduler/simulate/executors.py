"""Simulated executors: how their tasks advance."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from alto.records import Gpu
from alto.scheduler.inter_task import Member, alone_rates, finish_times_s, member_of
from alto.scheduler.simulate.workload import SimulatedTask

_TOLD_AT = 0.5
"""Share of an attempt after which its executor reports an estimate of the remaining time."""


@dataclass(slots=True, kw_only=True)
class Work:
    """The true state of a task.

    Attributes:
        left_s: Seconds of work that remained at the start of the latest attempt, when run alone.
        luck: Random generator of this task.
        attempt: Number of the latest attempt.
        gpus: GPUs of the running attempt; empty if none runs.
        started_s: Start of the latest attempt.
        done_s: Seconds of `left_s` that the latest attempt had done when its executor last changed.
        has_told: Whether the latest attempt has reported its remaining time.
    """

    task: SimulatedTask
    left_s: float
    luck: random.Random
    attempt: int = 0
    gpus: tuple[Gpu, ...] = ()
    started_s: float = 0.0
    done_s: float = 0.0
    has_told: bool = False

    @property
    def remaining_s(self) -> float:
        """Remaining seconds of work, when run alone."""
        return max(self.left_s - self.done_s, 0.0)

    @property
    def member(self) -> Member:
        """The remaining work, for the model of time."""
        return member_of(self.remaining_s, self.task.step_share * self.remaining_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A forecast for one task, valid while no task joins or leaves its executor.

    Attributes:
        work: The task.
        end_s: When the task ends or is lost, by the virtual clock.
        is_lost: Whether the task is then lost together with its executor.
        told_s: When the task reports its remaining time; None if it does not.
        remaining_s: The remaining time that it reports.
    """

    work: Work
    end_s: float
    is_lost: bool = False
    told_s: float | None = None
    remaining_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedExecutor:
    """One executor; its tasks advance by the model of time in :mod:`alto.scheduler.inter_task.colocation`.

    Attributes:
        name: Name in the queue; empty if no other task may join.
        crash_s: When the executor is lost if it still runs, by the virtual clock.
        works: Its tasks.
        version: Number of joins and leaves so far; a forecast made at an earlier version is void.
    """

    name: str
    crash_s: float
    works: list[Work] = field(default_factory=list)
    version: int = 0
    _since_s: float = 0.0

    def join(self, work: Work, now_s: float) -> None:
        self._advance(now_s)
        work.started_s, work.done_s, work.has_told = now_s, 0.0, False
        self.works.append(work)

    def leave(self, work: Work, now_s: float) -> None:
        self._advance(now_s)
        self.works.remove(work)

    def forecasts(self) -> Iterator[Forecast]:
        """Yield the forecast for each of its tasks, counted from the last change."""
        members = [work.member for work in self.works]
        ends_s, rates = finish_times_s(members), alone_rates(members)
        for work, last_s, rate in zip(self.works, ends_s, rates, strict=True):
            end_s = self._since_s + work.remaining_s / rate
            if self.crash_s < end_s:
                yield Forecast(work=work, end_s=self.crash_s, is_lost=True)
                continue
            half_s = (1 - _TOLD_AT) * work.left_s
            told_s = max(end_s - half_s / rate, self._since_s)
            remaining_s = half_s if len(members) == 1 else max(self._since_s + last_s - told_s, 0.0)
            yield Forecast(work=work, end_s=end_s, told_s=None if work.has_told else told_s, remaining_s=remaining_s)

    def _advance(self, now_s: float) -> None:
        for work, rate in zip(self.works, alone_rates([work.member for work in self.works]), strict=True):
            work.done_s += (now_s - self._since_s) * rate
        self._since_s = now_s
        self.version += 1
