"""Records of one job: its evaluations, its ranking, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class ExitReason(StrEnum):
    """The reasons why a job ended before its last step. A user's rule has a separate reason."""

    DIVERGING = "diverging"
    OVERFITTING = "overfitting"
    COLLAPSED = "collapsed"
    UNDERPERFORMING = "underperforming"
    STOPPED = "stopped"
    FAILED = "failed"
    BUDGET = "budget"


def exit_reason(text: str) -> str:
    """Return the `ExitReason` for ``text`` of a journal, or the text itself if it is the reason of a user's rule."""
    return ExitReason(text) if text in list(ExitReason) else text


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPoint:
    """The values of a job at one of its evaluations.

    Attributes:
        step: Optimizer steps done so far (the first evaluation cannot be earlier than step 1).
        total_steps: Optimizer steps of the job if nothing ends it early.
        train_ema: Exponentially smoothed training loss after ``step`` steps.
        validation_loss: Loss on the validation set, not smoothed: nats per token; for pairs, in the unit of their loss.
        score: Value of the metric that the task selects by, higher is better; always 0 if that is the loss.
        score_rows: Per-row scores, in the order of the validation rows; empty if the metric is the loss or is known
            only as a mean.
        loss_scale: Text with the settings that decide the scale of the loss; losses of different scales are not
            comparable.
        start_loss: Validation loss before the first step; None if it is not known.
        loss_rows: Loss of every validation row of the evaluation, in the order of evaluation; empty if evaluations use
            all rows.
        step_metrics: Measurements of each training step since the previous evaluation, by name; only for jobs that
            learn from rewards (see the event ``train``).
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
    step_metrics: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)

    @property
    def progress(self) -> float:
        """Share of the job's own steps done, in (0, 1]."""
        return self.step / self.total_steps

    @property
    def sort_key(self) -> tuple[float, float]:
        """Sort key that puts the best evaluation first: the highest score, or for equal scores the lowest loss."""
        return (-self.score, self.validation_loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartValue:
    """A job's evaluation before its first step; :class:`LossPoint` describes the attributes.

    It evaluates the frozen base model, which a new adapter does not change, or the saved adapter that jobs begin with
    (``init_adapter``).
    """

    validation_loss: float
    score: float = 0.0
    score_rows: tuple[float, ...] = ()
    loss_rows: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLoss:
    """The loss of an adapter on the rows of a split.

    Attributes:
        loss: Mean loss, in the unit of the validation loss.
        rows: Loss of every row, in their order; empty if only the mean is known.
    """

    loss: float
    rows: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitDecision:
    """A verdict on one job: end it at ``step`` for ``reason``, because of ``evidence``.

    ``reason`` is an `ExitReason`, or the reason of a user's rule. ``evidence`` holds the numbers on which the verdict
    is based (slopes, gaps, ranks, thresholds), and the text of an error.
    """

    job: str
    step: int
    reason: str
    evidence: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A point of selection: at ``progress`` of its steps every job is ranked, and a share of the jobs continues.

    Attributes:
        progress: Share of a job's own steps, in (0, 1].
        keep: Share of the jobs kept by the previous rung that continue, in (0, 1].
        min_kept: Smallest number of jobs that continue; if fewer compete, all of them continue.
        max_kept: Largest number of jobs that continue; None means no limit.
        ends_clear_losers: Whether jobs clearly behind the best end, even if they rank high enough to continue.
    """

    progress: float
    keep: float
    min_kept: int = 1
    max_kept: int | None = None
    ends_clear_losers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The state of a job when a rung ranks it.

    Attributes:
        validation_loss: Loss of the evaluation with which the job competes: the one at the rung while it still trains,
            or that of its best checkpoint if it has ended. NaN or infinity ranks last.
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
    """The outcome of a rung: the jobs kept, and a verdict for every training job that is not kept.

    ``kept`` is ordered best first and may contain jobs that have already ended.
    """

    kept: tuple[str, ...]
    dropped: tuple[ExitDecision, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """The result of one job.

    Attributes:
        config: The job's resolved configuration, with canonical keys.
        steps: Steps done; equal to ``total_steps`` if nothing ended the job early.
        exit_reason: An `ExitReason`, or the reason of a user's rule; None if the job did all its steps.
        best_step: Step of the best evaluation by the task's metric; 0 if the job was never evaluated.
        best_validation_loss: Validation loss at ``best_step``; infinity if no evaluation had a finite loss.
        samples_trained: Number of rows trained, counting repeats over epochs.
        samples_budgeted: Number of rows the job would have trained without early exit.
        best_metrics: Metrics of the method at ``best_step``.
        test_loss: Loss on the test rows at ``best_step``; None if it was not measured (see the task's ``test_jobs``).
        test_metrics: Metrics of the method on the test rows at ``best_step``; empty if they were not measured.
    """

    job: str
    config: Mapping[str, Any]
    steps: int
    total_steps: int
    exit_reason: str | None
    exit_evidence: Mapping[str, float | str]
    best_step: int
    best_validation_loss: float
    samples_trained: int
    samples_budgeted: int
    best_metrics: Mapping[str, float] = field(default_factory=dict)
    test_loss: float | None = None
    test_metrics: Mapping[str, float] = field(default_factory=dict)
