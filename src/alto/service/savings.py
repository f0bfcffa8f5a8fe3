"""Training that early exit saved in a task."""

from __future__ import annotations

from dataclasses import dataclass

from alto.records import ExitReason
from alto.runs import RunHistory
from alto.runs.progress import training_time_s

_NOT_BY_RULES = (ExitReason.STOPPED, ExitReason.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """Training that the early-exit rules saved. Jobs that failed or that a user stopped do not count.

    Attributes:
        samples: Budgeted samples that were not trained.
        share: ``samples`` as a fraction of all budgeted samples, in [0, 1].
        time_s, device_h: Time that these samples would have taken at the run's pace; None if nothing was saved or
            the pace is unknown.
    """

    samples: int
    share: float
    time_s: float | None
    device_h: float | None


def savings_of(history: RunHistory, status: str) -> Savings:
    """Return the savings of the task whose run has ``history``; a failed task has saved nothing."""
    jobs = [] if status == "failed" else [job for job in history.jobs.values() if job.exit_reason not in _NOT_BY_RULES]
    samples = sum(job.samples_saved for job in jobs)
    time_s = training_time_s(history, samples) if samples else None
    return Savings(
        samples=samples,
        share=samples / history.samples_budgeted if history.samples_budgeted else 0.0,
        time_s=time_s,
        device_h=None if time_s is None else time_s * history.num_ranks / 3600,
    )
