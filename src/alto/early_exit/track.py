"""The state that a selection keeps of one job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from alto.early_exit.noise import is_better, is_within_noise, on_scale_of
from alto.early_exit.progress import point_at_fraction
from alto.errors import SpecError
from alto.records import Candidate, ExitDecision, ExitReason, FinalistScore, LossPoint, Rung, StartValue
from alto.spec import rung_step


@dataclass(slots=True)
class Ema:
    """A running average ``ema = alpha * loss + (1 - alpha) * ema``, started by the first loss.

    Attributes:
        value: The average so far; None before the first loss.
    """

    alpha: float
    value: float | None = None
    count: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha <= 1.0:
            raise SpecError(
                f"ema_alpha: expected a weight in (0, 1], found {self.alpha}. Use 1 for no smoothing, a "
                "smaller value for more smoothing."
            )

    def update(self, loss: float) -> float:
        """Add the loss of one more step and return the average after it."""
        self.value = loss if self.value is None else self.alpha * loss + (1.0 - self.alpha) * self.value
        self.count += 1
        return self.value


ENDS_COMPETING = (
    ExitReason.DIVERGING,
    ExitReason.UNDERPERFORMING,
    ExitReason.STOPPED,
    ExitReason.FAILED,
    ExitReason.BUDGET,
)
"""Reasons after which a job is not ranked at later rungs. After overfitting, or after a user's rule, the best
evaluation of the job is still ranked."""


@dataclass(slots=True)
class JobTrack:
    """The evaluations of one job, and its state.

    Attributes:
        late_rung: For a job that was added while others trained: the first rung that it has not reached yet, or that
            was decided without it. None for all other jobs, and once it waits at a rung with them.
        best, peak: The evaluation that the job is ranked by in the end, and the evaluation with the best score.
        competes: Whether the job is still ranked at rungs.
        judged_from: Index of the first evaluation that rules look at. Earlier ones are ignored after a job is resumed
            or forked.
        step_metrics: Measurements of the steps since the latest evaluation, by name.
    """

    total_steps: int
    ema: Ema
    loss_scale: str = ""
    start: StartValue | None = None
    was_ranked: bool = False
    late_rung: int | None = None
    history: list[LossPoint] = field(default_factory=list)
    best: LossPoint | None = None
    peak: LossPoint | None = None
    decision: ExitDecision | None = None
    finished: bool = False
    competes: bool = True
    judged_from: int = 0
    step_metrics: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        return self.decision is None and not self.finished

    @property
    def steps(self) -> int:
        """Steps done at the latest evaluation."""
        return self.history[-1].step if self.history else 0

    @property
    def ranking_point(self) -> LossPoint | None:
        """The evaluation that the job is ranked by if no other is given; None if it is not ranked."""
        if self.trains:
            return self.history[-1] if self.history else None
        return self.best if self.competes else None

    @property
    def has_failed(self) -> bool:
        """Whether the job ended for a reason that concerns its configuration, not only its rank."""
        return self.decision is not None and self.decision.reason in (ExitReason.DIVERGING, ExitReason.FAILED)

    def candidate(self, point: LossPoint, score: FinalistScore | None = None) -> Candidate:
        """Return the state of the job at a rung with ``point``, one of its evaluations."""
        return Candidate(
            job=point.job,
            step=self.ema.count,
            validation_loss=point.validation_loss,
            score=point.score if score is None else score.score,
            score_rows=point.score_rows if score is None else score.rows,
            loss_scale=point.loss_scale,
            start_loss=point.start_loss,
            loss_rows=point.loss_rows,
            is_training=self.trains,
        )

    def is_at_rung_of(self, point: LossPoint, *, equal_shares: bool) -> bool:
        """Return whether the job waits at the rung of ``point``, or trained past it and was stopped there by a verdict.

        Args:
            equal_shares: Whether jobs are compared at exactly the same fraction of their steps. A job that finished
                at the rung must not have an advantage over the others.
        """
        if self.finished and self.steps == point.step:
            return equal_shares
        return self.trains or self.ended_after(point)

    def add_metrics(self, metrics: Mapping[str, Sequence[float]]) -> None:
        """Add the measurements of further steps."""
        added = {name: (*self.step_metrics.get(name, ()), *values) for name, values in metrics.items()}
        self.step_metrics = {**self.step_metrics, **added}

    def take_metrics(self) -> Mapping[str, tuple[float, ...]]:
        """Return the measurements of the steps since the latest evaluation, and start a new collection."""
        taken, self.step_metrics = self.step_metrics, {}
        return taken

    def keep_best(self, point: LossPoint, row_weights: Sequence[float]) -> None:
        """Replace the best evaluation by ``point``, the latest one, if that is better."""
        if self.peak is None or point.score > self.peak.score:
            self.peak = point
        # A series of steps, each within noise of the step before, must not lead away from the best score.
        if self.best is None or (
            is_better(on_scale_of(self.best, point, row_weights), self.best) and is_within_noise(point, self.peak)
        ):
            self.best = point

    def at_rung(self, rung: Rung, row_weights: Sequence[float] | None) -> LossPoint | None:
        """Return the value of the job at ``rung``; None if it has not reached it.

        Args:
            row_weights: Weight of every validation row, in the order of evaluation, to interpolate to exactly the
                fraction of the rung; None for the first evaluation at or after the rung.
        """
        if row_weights is not None:
            return point_at_fraction(self.history, rung, self.total_steps, self.start, row_weights)
        step = rung_step(rung, self.total_steps)
        return next((point for point in self.history if point.step >= step), None)

    def ended_after(self, point: LossPoint) -> bool:
        """Return whether the job continued after ``point``, one of its evaluations, and ended later, not by a user."""
        if self.decision is None:
            return self.finished and self.steps > point.step
        if self.decision.reason is ExitReason.FAILED:
            return True  # it failed after this point, because a step or an evaluation that fails is not counted
        return self.decision.step > point.step and self.decision.reason is not ExitReason.STOPPED

    def forked(self, job: str) -> JobTrack:
        """Return the track of a job that continues from here, with everything observed so far."""
        return replace(
            self,
            ema=replace(self.ema),
            history=[replace(point, job=job) for point in self.history],
            best=None,
            peak=None,
            decision=None,
            judged_from=len(self.history),
        )


def failed_configurations(tracks: Mapping[str, JobTrack], configuration_of: Mapping[str, str]) -> set[str]:
    """Return the repeated configurations with a job that has diverged or failed."""
    return {name for job, name in configuration_of.items() if tracks[job].has_failed}
