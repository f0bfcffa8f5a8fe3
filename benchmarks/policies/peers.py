"""Replays the schedulers of Ray Tune and Optuna on a recording: the job that each keeps, and its cost.

All compare jobs as ALTO does, by values interpolated to exactly equal shares of the steps; but without ALTO's floor,
finish, and test for overfitting.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from alto.early_exit import RecordedJob, Recording, point_at_fraction
from alto.records import LossPoint, Rung

__all__ = ["PEERS", "Kept", "asha", "hyperband", "median", "synchronous_halving"]

FIRST = 0.025
"""Share of the steps at the first rung of all of them."""

_WORKERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The outcome of a policy.

    Attributes:
        job, step: Job and step of the best evaluation that was seen.
        samples_trained: Training rows of all jobs until they ended.
    """

    job: str
    step: int
    samples_trained: int


def synchronous_halving(recording: Recording, eta: int = 2) -> Kept:
    """Keep the best ``1/eta`` of the jobs at every ``eta``-fold share of the steps, where all jobs wait for all
    others."""
    return _kept(recording, _halved(recording.jobs, _shares(FIRST, eta), eta))


def asha(recording: Recording, eta: int = 4, seed: int = 0) -> Kept:
    """Replay Ray Tune's ``ASHAScheduler``: as many jobs train at a time as there are workers; a job that reaches a
    milestone stops unless it is among the best ``1/eta`` of all that were there before it."""
    shares = _shares(FIRST, eta)
    order = list(recording.jobs)
    random.Random(seed).shuffle(order)
    seen: dict[float, list[float]] = {share: [] for share in shares}
    ends: dict[str, float] = {}
    running: list[tuple[float, int, int]] = []  # samples until the next milestone, position of the job, milestone
    waiting = list(range(len(order)))
    clock = 0.0

    def arrival(position: int, milestone: int, now: float) -> tuple[float, int, int]:
        before = shares[milestone - 1] if milestone else 0.0
        until = shares[milestone] if milestone < len(shares) else 1.0
        return (now + (until - before) * _samples(recording, order[position]), position, milestone)

    while running or waiting:
        while waiting and len(running) < _WORKERS:
            running.append(arrival(waiting.pop(0), 0, clock))
        running.sort()
        clock, position, milestone = running.pop(0)
        if milestone == len(shares):
            continue
        value, share = value_at(order[position], shares[milestone]), shares[milestone]
        seen[share].append(value)
        cutoff = sorted(seen[share])[max(0, math.ceil(len(seen[share]) / eta) - 1)]
        if value > cutoff:
            ends[order[position].job] = share
        else:
            running.append(arrival(position, milestone + 1, clock))
    return _kept(recording, ends)


def hyperband(recording: Recording, eta: int = 3, seed: int = 0) -> Kept:
    """Replay Hyperband: brackets of halving that begin at larger and larger shares of the steps, each with a part of
    the jobs."""
    brackets = [*(_shares(first, eta) for first in _shares(FIRST, eta)), ()]
    weights = [eta ** (len(brackets) - 1 - index) / (len(brackets) - index) for index in range(len(brackets))]
    source = random.Random(seed)
    of_bracket: list[list[RecordedJob]] = [[] for _ in brackets]
    for job in recording.jobs:
        of_bracket[source.choices(range(len(brackets)), weights)[0]].append(job)
    ends: dict[str, float] = {}
    for field, shares in zip(of_bracket, brackets, strict=True):
        ends |= _halved(field, shares, eta)
    return _kept(recording, ends)


def median(recording: Recording, seed: int = 0) -> Kept:
    """Replay Optuna's ``MedianPruner``: one job after the other; from the sixth on, a job stops at a tenth of its steps
    if its best value so far is above the median of the others' values there."""
    order = list(recording.jobs)
    random.Random(seed).shuffle(order)
    shares = [round(0.1 * number, 9) for number in range(1, 10)]
    seen: dict[float, list[float]] = {share: [] for share in shares}
    ends: dict[str, float] = {}
    for number, job in enumerate(order):
        best = math.inf
        for share in shares:
            value = value_at(job, share)
            best = min(best, value)
            if number >= 5 and seen[share] and best > statistics.median(seen[share]):
                ends[job.job] = share
                break
            seen[share].append(value)
    return _kept(recording, ends)


def _of_seeds(policy: Callable[..., Kept]) -> Callable[[Recording], Sequence[Kept]]:
    return lambda recording: [policy(recording, seed=seed) for seed in range(5)]


PEERS: Mapping[str, Callable[[Recording], Sequence[Kept]]] = {
    "halving, eta 2": lambda recording: [synchronous_halving(recording, 2)],
    "halving, eta 4": lambda recording: [synchronous_halving(recording, 4)],
    "ASHA": _of_seeds(asha),
    "Hyperband": _of_seeds(hyperband),
    "median pruner": _of_seeds(median),
}
"""Functions by name that replay each of them; those that draw return several outcomes, with five seeds."""


def value_at(job: RecordedJob, share: float) -> float:
    """Return the validation loss (or the negated score) of ``job`` after exactly ``share`` of its steps; infinite if it
    was not finite, or the job was not evaluated any more."""
    points = [
        LossPoint(
            job=job.job,
            step=step,
            total_steps=job.total_steps,
            train_ema=0.0,
            validation_loss=loss,
            score=score,
        )
        for step, loss, score, _ in job.scored_evaluations
    ]
    point = point_at_fraction(points, Rung(progress=share, keep=1.0), job.total_steps, job.start)
    if point is None or not math.isfinite(point.validation_loss):
        return math.inf
    return -point.score if job.scores else point.validation_loss


def _halved(jobs: Sequence[RecordedJob], shares: Sequence[float], eta: int) -> dict[str, float]:
    """Return the ends of the jobs if at every share only the best ``1/eta`` continue."""
    field, ends = list(jobs), dict[str, float]()
    for share in shares:
        field.sort(key=lambda job: (value_at(job, share), job.job))
        num_kept = max(1, math.ceil(len(field) / eta))
        ends |= {job.job: share for job in field[num_kept:]}
        field = field[:num_kept]
    return ends


def _shares(first: float, eta: int) -> tuple[float, ...]:
    shares = []
    while first < 1:
        shares.append(first)
        first *= eta
    return tuple(shares)


def _samples(recording: Recording, job: RecordedJob) -> int:
    return recording.samples_after(job, job.total_steps)


def _kept(recording: Recording, ends: Mapping[str, float]) -> Kept:
    """Return the best evaluation before the ends of jobs (shares of their steps), and the samples trained until
    then."""
    best: tuple[float, float, str, int] | None = None
    samples = 0
    for job in recording.jobs:
        last = math.ceil(ends.get(job.job, 1.0) * job.total_steps - 1e-9)
        last = min(last, len(job.train_losses))  # a loss that is not finite ends it in any case
        samples += recording.samples_after(job, last)
        for step, loss, score, _ in job.scored_evaluations:
            if step <= last and math.isfinite(loss):
                best = min(filter(None, (best, (-score, loss, job.job, step))))
    assert best is not None, "no job was evaluated"
    return Kept(job=best[2], step=best[3], samples_trained=samples)
