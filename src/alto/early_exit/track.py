"""What a selection knows of one job."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from alto.early_exit.smoothing import Ema
from alto.records import ExitDecision, ExitReason, FinalistScore, LossPoint, Standing, StartValue

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
            is_training=self.trains,
        )

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
