"""Measures what a policy saves and loses on a recording: on the rows that chose, and on test rows that were not used
for the choice."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from alto import EarlyExit
from alto.early_exit import RecordedJob, Recording
from benchmarks.paper import curves
from benchmarks.policies.peers import Kept

__all__ = ["Outcome", "improvement_lost", "outcome_of", "replayed", "resampled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The effect of a policy on a recording, compared with training every job to its end.

    Attributes:
        saved: Share of the samples that it does not train.
        job: The job that it keeps.
        regret: Validation loss of the adapter that it keeps, divided by that of the best; None if jobs are chosen by a
            score, or losses may be negative.
        test_regret: The same on test rows, for the two adapters that the validation rows chose; None without test rows.
        lost: Lost share of the best job's improvement on the frozen base, on the test rows if there are any, else on
            the validation rows.
        within_error: Whether the two adapters are within one paired standard error on the test rows; None without them.
    """

    saved: float
    job: str
    regret: float | None
    test_regret: float | None
    lost: float
    within_error: bool | None


def replayed(recording: Recording, settings: EarlyExit) -> Kept:
    """Return the outcome of ALTO's own policy with ``settings``."""
    found = curves.replayed(recording, settings.resolved(earliest=recording.earliest_rung))
    assert found.winner is not None
    return Kept(job=found.winner, step=found.winner_step, samples_trained=found.samples_trained)


def outcome_of(recording: Recording, kept: Kept, best: Kept) -> Outcome:
    """Compare the job that a policy kept with ``best``, the job that training every job to its end keeps."""
    jobs = {job.job: job for job in recording.jobs}
    ours, theirs = jobs[kept.job], jobs[best.job]
    budget = sum(recording.samples_after(job, job.total_steps) for job in recording.jobs)
    loss, best_loss = _loss(ours, kept.step), _loss(theirs, best.step)
    test, best_test = ours.tests.get(kept.step), theirs.tests.get(best.step)
    test_regret, within_error = None, None
    if test is not None and best_test is not None:
        test_regret = test.loss / best_test.loss if best_test.loss > 0 else None
        differences = [one - other for one, other in zip(test.rows, best_test.rows, strict=True)]
        error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
        within_error = test.loss - best_test.loss <= error
    return Outcome(
        saved=1 - kept.samples_trained / budget,
        job=kept.job,
        regret=loss / best_loss if best_loss > 0 and not theirs.scores else None,
        test_regret=test_regret,
        lost=improvement_lost(recording, kept, best),
        within_error=within_error,
    )


def improvement_lost(recording: Recording, kept: Kept, best: Kept) -> float:
    """Return the share of the best job's improvement on the frozen base that is lost with the kept job."""
    jobs = {job.job: job for job in recording.jobs}
    ours, theirs = jobs[kept.job], jobs[best.job]
    test, best_test, base = ours.tests.get(kept.step), theirs.tests.get(best.step), theirs.tests.get(0)
    if test is not None and best_test is not None and base is not None:
        return (test.loss - best_test.loss) / (base.loss - best_test.loss)
    start = max(job.start.validation_loss for job in recording.jobs if job.start is not None)
    best_loss = _loss(theirs, best.step)
    return (_loss(ours, kept.step) - best_loss) / (start - best_loss)


def resampled(recording: Recording, seed: int) -> Recording:
    """Return as many jobs, drawn with replacement."""
    drawn = random.Random(seed).choices(recording.jobs, k=len(recording.jobs))
    return replace(recording, jobs=tuple(replace(job, job=f"{job.job}#{index}") for index, job in enumerate(drawn)))


def interval(recording: Recording, measure: Callable[[Recording], float], num_draws: int) -> tuple[float, float]:
    """Return the 95 % interval of ``measure`` over draws of the jobs of ``recording``."""
    found = sorted(measure(resampled(recording, seed)) for seed in range(num_draws))
    return found[math.floor(0.025 * num_draws)], found[math.ceil(0.975 * num_draws) - 1]


def _loss(job: RecordedJob, step: int) -> float:
    return next(loss for at, loss in job.evaluations if at == step)
