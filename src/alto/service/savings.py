"""What early exit has saved in a task."""

from __future__ import annotations

from dataclasses import dataclass

from alto.records import ExitReason
from alto.runs import RunHistory

__all__ = ["Savings", "savings_of"]

_NOT_BY_RULES = (ExitReason.STOPPED, ExitReason.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """What rules of early exit have saved: jobs that a user has stopped, or that failed, do not count.

    Attributes:
        samples: Rows of the budget that need not be trained.
        share: Of all rows of the budget, in [0, 1].
        time_s, device_h: What these rows would have taken at the run's average pace; None where there are none.
    """

    samples: int
    share: float
    time_s: float | None
    device_h: float | None


def savings_of(history: RunHistory, status: str) -> Savings:
    """The savings of a task whose run has ``history``; a failed one has saved nothing.

    Args:
        history: Of its run.
        status: Of the task.
    """
    jobs = [] if status == "failed" else [job for job in history.jobs.values() if job.exit_reason not in _NOT_BY_RULES]
    samples = sum(job.samples_saved for job in jobs)
    time_s = None
    if samples and history.samples_trained and history.duration_s > 0:
        time_s = samples * history.duration_s / history.samples_trained
    return Savings(
        samples=samples,
        share=samples / history.samples_budgeted if history.samples_budgeted else 0.0,
        time_s=time_s,
        device_h=None if time_s is None else time_s * history.num_ranks / 3600,
    )
