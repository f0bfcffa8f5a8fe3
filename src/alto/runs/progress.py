"""Progress and pace of a run, and savings of early exit: the numbers that tables and pages share."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from alto.records import Rung
from alto.runs.history import RunHistory
from alto.runs.job_history import JobHistory
from alto.spec.rungs import places_at

__all__ = [
    "ExitTotal",
    "Pace",
    "RungCost",
    "exit_totals",
    "expected_samples_left",
    "next_stop",
    "rung_costs",
    "time_saved_s",
]

WINDOW_S = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitTotal:
    """Totals of one outcome over all jobs; ``share`` is of all budgeted samples.

    Attributes:
        outcome: Reason of the exit, or the stage of the jobs.
        num_jobs: Number of jobs.
        samples_trained: Samples that they trained.
        samples_saved: Budgeted samples that they did not train.
    """

    outcome: str
    num_jobs: int
    samples_trained: int
    samples_saved: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RungCost:
    """What was trained between two rungs.

    Attributes:
        until: Share of a job's own steps at which the second of them ranks; 1 after the last rung.
        num_kept, num_dropped: Jobs that continued and that ended there; None after the last rung.
        samples_trained: Rows that all jobs have seen since the rung before.
        share: Of the rows that were trained in all.
    """

    until: float
    num_kept: int | None
    num_dropped: int | None
    samples_trained: int
    share: float


def rung_costs(history: RunHistory) -> list[RungCost]:
    """What each rung cost, in their order, and what came after the last; empty where no rung was decided."""
    costs, before, total = [], 0, max(1, history.samples_trained)
    ends = [(rung.progress, len(rung.kept), len(rung.dropped), rung.samples_trained) for rung in history.rungs]
    for until, num_kept, num_dropped, samples in [*ends, (1.0, None, None, history.samples_trained)] if ends else []:
        costs.append(
            RungCost(
                until=until,
                num_kept=num_kept,
                num_dropped=num_dropped,
                samples_trained=samples - before,
                share=(samples - before) / total,
            )
        )
        before = samples
    return costs


class Pace:
    """Work per second over the last minutes, from a count that only grows while the clock goes forward."""

    def __init__(self, *, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, float]] = deque()

    def note(self, time: float, count: float) -> None:
        """``count`` is the work done at ``time`` (unix seconds); a decrease of either restarts the measurement."""
        points = self._points
        if points and (time < points[-1][0] or count < points[-1][1]):
            points.clear()
        points.append((time, count))
        # The newest point before the window is its beginning.
        while len(points) > 2 and points[1][0] <= time - self._window_s:
            points.popleft()

    def per_second(self, now: float) -> float | None:
        """Work per second up to ``now``; None as long as no work was seen."""
        if not self._points:
            return None
        (first_time, first_count), (last_time, last_count) = self._points[0], self._points[-1]
        elapsed_s = max(now, last_time) - first_time
        return (last_count - first_count) / elapsed_s if last_count > first_count and elapsed_s > 0 else None


def expected_samples_left(history: RunHistory) -> float:
    """Samples yet to be trained if every rung ahead keeps its share of the jobs.

    Exits for other reasons reduce it further.
    """
    ahead = _rungs_ahead(history)
    survivals = _survivals(history, [index for index, _ in ahead])
    samples = 0.0
    for job in history.jobs.values():
        if job.has_ended:
            continue
        share, at, survival = 0.0, job.progress, 1.0
        for (_, rung), kept in zip(ahead, survivals, strict=True):
            reached = max(at, rung.progress)
            share += survival * (reached - at)
            at, survival = reached, survival * kept
        samples += (share + survival * (1.0 - at)) * job.samples_budgeted
    return samples


def _survivals(history: RunHistory, ahead: list[int]) -> list[float]:
    """Of each rung ahead, the share of those that reach it that continue."""
    rungs, num_jobs = history.rung_settings, len(history.jobs)
    num_left, shares = sum(not job.has_ended for job in history.jobs.values()), []
    for index in ahead:
        num_kept = min(num_left, places_at(rungs, index, num_jobs))
        shares.append(num_kept / max(1, num_left))
        num_left = num_kept
    return shares


def next_stop(history: RunHistory, job: JobHistory) -> tuple[str, float]:
    """The next stop of ``job``, ``rung`` or ``end``, and the steps left until it: 0 or less if it is reached."""
    ahead = _rungs_ahead(history)
    if ahead:
        return "rung", ahead[0][1].progress * job.total_steps - job.step
    return "end", job.total_steps - job.step


def _rungs_ahead(history: RunHistory) -> list[tuple[int, Rung]]:
    """Rungs that have not been decided, by number."""
    held = {outcome.rung for outcome in history.rungs}
    return [(index, rung) for index, rung in enumerate(history.rung_settings) if index not in held]


def time_saved_s(history: RunHistory) -> float | None:
    """Seconds that the saved samples would have taken at the run's average pace; None if it is unknown."""
    if not history.samples_trained or not history.samples_saved or history.duration_s <= 0:
        return None
    return history.samples_saved * history.duration_s / history.samples_trained


def exit_totals(history: RunHistory) -> list[ExitTotal]:
    """Jobs and samples per outcome, the outcome that saved most first."""
    totals = []
    for outcome in dict.fromkeys(job.outcome for job in history.jobs.values()):
        jobs = [job for job in history.jobs.values() if job.outcome == outcome]
        saved = sum(job.samples_saved for job in jobs)
        totals.append(
            ExitTotal(
                outcome=outcome,
                num_jobs=len(jobs),
                samples_trained=sum(job.samples_trained for job in jobs),
                samples_saved=saved,
                share=saved / history.samples_budgeted if history.samples_budgeted else 0.0,
            )
        )
    return sorted(totals, key=lambda total: -total.samples_saved)
