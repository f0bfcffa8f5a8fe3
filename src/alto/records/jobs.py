"""One job: its evaluations, how it is ranked, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = [
    "ExitDecision",
    "ExitReason",
    "JobResult",
    "LossPoint",
    "Rung",
    "RungResult",
    "SplitLoss",
    "Standing",
    "StartValue",
    "exit_reason",
]


class ExitReason(StrEnum):
    """Why a job ended before its last step. A rule of a user has a reason of its own beside these."""

    DIVERGING = "diverging"
    OVERFITTING = "overfitting"
    UNDERPERFORMING = "underperforming"
    STOPPED = "stopped"
    FAILED = "failed"
    BUDGET = "budget"


def exit_reason(text: str) -> str:
    """The reason ``text`` of a journal: an `ExitReason`, or the text itself for a user's rule."""
    return ExitReason(text) if text in list(ExitReason) else text


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPoint:
    """The values of a job at one of its evaluations.

    Attributes:
        job: Job id.
        step: Optimizer steps done so far (the first evaluation cannot be earlier than step 1).
        total_steps: Optimizer steps of the job if nothing ends it early.
        train_ema: Exponentially smoothed training loss after ``step`` steps.
        validation_loss: Loss on the validation set, not smoothed: nats per token; for pairs, in the unit of their loss.
        score: Value of the metric that the task selects by, higher is better; 0 for all where that is the loss.
        score_rows: Its value on every validation row, in their order; empty where the metric is the loss or is known as
            a mean only.
        loss_scale: Names the settings that decide the scale of the loss; losses of different scales cannot be compared.
        start_loss: Validation loss before the first step; None where it is not known.
        loss_rows: Loss of every validation row of the evaluation, in the order of evaluation; empty where evaluations
            are on all rows.
    """

    job: str
    step: int
    total_steps: int
    train_ema: float
    validation_loss: float
    score: float = 0.0
    score_rows: tuple[float, ...] = ()
    loss_scale: str = ""
    start_loss: float | None = None
    loss_rows: tuple[float, ...] = ()

    @property
    def progress(self) -> float:
        """Share of the job's own steps done, in (0, 1]."""
        return self.step / self.total_steps

    @property
    def sort_key(self) -> tuple[float, float]:
        """Orders evaluations, the least first: by score, and where scores are equal by validation loss."""
        return (-self.score, self.validation_loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartValue:
    """A job's evaluation before its first step: that of the frozen base, which a new adapter does not change, or of the
    saved adapter that jobs begin with (``init_adapter``).

    Attributes:
        validation_loss, score, score_rows, loss_rows: As in :class:`LossPoint`.
    """

    validation_loss: float
    score: float = 0.0
    score_rows: tuple[float, ...] = ()
    loss_rows: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLoss:
    """The loss of an adapter on the rows of a split.

    Attributes:
        loss: In the unit of the validation loss.
        rows: Of every row, in their order; empty where only the mean is known.
    """

    loss: float
    rows: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitDecision:
    """A verdict on one job: end it at ``step`` for ``reason``, because of ``evidence``.

    ``reason`` is an `ExitReason`, or that of a user's rule. ``evidence`` holds the numbers the verdict was based on
    (slopes, gaps, ranks, thresholds).
    """

    job: str
    step: int
    reason: str
    evidence: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A point of selection: at ``progress`` of its steps every job is ranked, and a share of the jobs continues.

    Attributes:
        progress: Share of a job's own steps, in (0, 1].
        keep: Share of the jobs that continue, of those that the previous rung kept, in (0, 1].
        min_kept: Smallest number of jobs that continue, if there are so many.
        max_kept: Largest number of jobs that continue; None sets no limit.
        ends_clear_losers: Whether jobs that lie clearly behind the best do not continue, though they are among them.
    """

    progress: float
    keep: float
    min_kept: int = 1
    max_kept: int | None = None
    ends_clear_losers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The state of a job when a rung ranks it.

    Attributes:
        job: Job id.
        step: Steps the job has done.
        validation_loss: Of the evaluation it competes with: that at the rung while it still trains, that of its best
            checkpoint when it has ended. NaN or infinity ranks last.
        score, score_rows, loss_scale, start_loss, loss_rows: Values of the same evaluation; see :class:`LossPoint`.
        is_training: Whether the job would continue if kept. A job that has ended (overfitting, or all its
            steps done) still competes for a place with its best checkpoint.
    """

    job: str
    step: int
    validation_loss: float
    score: float = 0.0
    score_rows: tuple[float, ...] = ()
    loss_scale: str = ""
    start_loss: float | None = None
    loss_rows: tuple[float, ...] = ()
    is_training: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RungResult:
    """The outcome of a rung: the jobs kept, and a verdict for every training job that is not.

    ``kept`` is ordered best first and may hold jobs that have already ended.
    """

    kept: tuple[str, ...]
    dropped: tuple[ExitDecision, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """How one job ended.

    Attributes:
        job: Job id.
        config: The job's resolved configuration, canonical keys.
        steps: Steps done; ``total_steps`` if nothing ended it early.
        exit_reason: An `ExitReason`, or that of a user's rule; None when the job did all its steps.
        best_step: Step of its best evaluation by the task's metric; 0 if it was never evaluated.
        best_validation_loss: The loss there; infinity if it was never evaluated with a finite loss.
        samples_trained: Rows seen in training, counting repeats over epochs.
        samples_budgeted: Rows the job would have seen without early exit.
        best_metrics: Metrics of its method there.
        test_loss: Loss on the test rows there; None where it was not measured (the task's ``test_jobs``).
        test_metrics: Metrics of its method on the test rows there; empty where they were not measured.
    """

    job: str
    config: Mapping[str, Any]
    steps: int
    total_steps: int
    exit_reason: str | None
    exit_evidence: Mapping[str, float]
    best_step: int
    best_validation_loss: float
    samples_trained: int
    samples_budgeted: int
    best_metrics: Mapping[str, float] = field(default_factory=dict)
    test_loss: float | None = None
    test_metrics: Mapping[str, float] = field(default_factory=dict)
