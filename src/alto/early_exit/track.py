"""What a selection knows of one job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from alto.early_exit.common_rows import on_scale_of
from alto.early_exit.noise import is_better, is_within_noise
from alto.early_exit.progress import point_at_share
from alto.early_exit.smoothing import Ema
from alto.records import ExitDecision, ExitReason, FinalistScore, LossPoint, Rung, Standing, StartValue
from alto.spec.rungs import rung_step

__all__ = ["ENDS_COMPETING", "JobTrack"]

ENDS_COMPETING = (
    ExitReason.DIVERGING,
    ExitReason.UNDERPERFORMING,
    ExitReason.STOPPED,
    ExitReason.FAILED,
    ExitReason.BUDGET,
)
"""Jobs that end for one of these do not compete at later rungs; after overfitting, or a user's rule, the best
evaluation competes."""


@dataclass(slots=True)
class JobTrack:
    """The evaluations of one job, and where it stands.

    Attributes:
        total_steps: Steps of the job.
        ema: Running average of its training losses.
        loss_scale: Scale of its loss.
        start: Evaluation before its first step; None where it is not known.
        was_ranked: Whether a rung has ranked it.
        late_rung: Of a job that was added while others trained: the first rung that it has not reached yet, or that was
            decided without it. None of all others, and once it waits at a rung with them.
        history: Evaluations, oldest first.
        best, peak: The evaluation that it competes with in the end, and the one with the best score.
        decision: The verdict that ended it.
        finished: It did all its steps.
        competes: It may still take a place at a rung.
        judged_from: Number of evaluations that no rule judges again.
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

    @property
    def trains(self) -> bool:
        return self.decision is None and not self.finished

    @property
    def steps(self) -> int:
        """Steps done at the latest evaluation."""
        return self.history[-1].step if self.history else 0

    @property
    def stands_with(self) -> LossPoint | None:
        """The evaluation it competes with by default; None if it does not compete."""
        if self.trains:
            return self.history[-1] if self.history else None
        return self.best if self.competes else None

    @property
    def has_failed(self) -> bool:
        """Whether it ended for a reason that says something about its configuration, not only about its place."""
        return self.decision is not None and self.decision.reason in (ExitReason.DIVERGING, ExitReason.FAILED)

    def standing(self, point: LossPoint, score: FinalistScore | None = None) -> Standing:
        """Where it stands at a rung with ``point``, one of its evaluations.

        Args:
            point: The evaluation.
            score: Of its answers; None where the metric ranks.
        """
        return Standing(
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

    def evaluated(
        self,
        job: str,
        validation_loss: float,
        score: float,
        score_rows: tuple[float, ...],
        loss_rows: tuple[float, ...],
    ) -> LossPoint:
        """Note and return an evaluation after the steps that it has done; arguments as of :class:`LossPoint`."""
        assert self.ema.value is not None, "it has trained"
        point = LossPoint(
            job=job,
            step=self.ema.count,
            total_steps=self.total_steps,
            train_ema=self.ema.value,
            validation_loss=validation_loss,
            score=score,
            score_rows=score_rows,
            loss_scale=self.loss_scale,
            start_loss=None if self.start is None else self.start.validation_loss,
            loss_rows=loss_rows,
        )
        self.history.append(point)
        return point

    def reopen(self) -> None:
        """Reopen the job: it trains and competes again, and is judged by its later evaluations."""
        self.decision = None
        self.competes = True
        self.judged_from = len(self.history)

    def stands_at(self, point: LossPoint, *, is_equal_share: bool) -> bool:
        """Whether it waits at the rung of ``point``, or trained past it and ended there by a verdict.

        Args:
            point: Its value at the rung.
            is_equal_share: Whether jobs are compared at exactly equal shares. One that finished at the rung must not
                have an advantage over them.
        """
        if self.finished and self.steps == point.step:
            return is_equal_share
        return self.trains or self.ended_after(point)

    def keep_best(self, point: LossPoint, row_weights: Sequence[float]) -> None:
        """Replace the best evaluation by ``point``, the latest, where that is better.

        Args:
            point: The evaluation.
            row_weights: Weight of every validation row, in the order of evaluation.
        """
        if self.peak is None or point.score > self.peak.score:
            self.peak = point
        # Steps that are each within noise of the previous one must not lead away from the best score.
        if self.best is None or (
            is_better(on_scale_of(self.best, point, row_weights), self.best) and is_within_noise(point, self.peak)
        ):
            self.best = point

    def at_rung(self, rung: Rung, row_weights: Sequence[float] | None) -> LossPoint | None:
        """Return its value at ``rung``; None if it has not reached it.

        Args:
            rung: The rung.
            row_weights: Weight of every validation row, in the order of evaluation, for the value at exactly the share
                of the rung; None for the first evaluation at or after it.
        """
        if row_weights is not None:
            return point_at_share(self.history, rung, self.total_steps, self.start, row_weights)
        step = rung_step(rung, self.total_steps)
        return next((point for point in self.history if point.step >= step), None)

    def ended_after(self, point: LossPoint) -> bool:
        """Whether it continued after ``point``, one of its evaluations, and then ended, other than by a user."""
        if self.decision is None:
            return self.finished and self.steps > point.step
        if self.decision.reason is ExitReason.FAILED:
            return True  # only what came after: a step or an evaluation that fails is not counted
        return self.decision.step > point.step and self.decision.reason is not ExitReason.STOPPED

    def forked(self, job: str) -> JobTrack:
        """The track of a job that continues from here, with all that was observed so far."""
        return replace(
            self,
            ema=replace(self.ema),
            history=[replace(point, job=job) for point in self.history],
            best=None,
            peak=None,
            decision=None,
            judged_from=len(self.history),
        )
