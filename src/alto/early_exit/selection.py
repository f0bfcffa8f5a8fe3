"""The state of one task's selection: who still trains, who waits at a rung, who has ended and why."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from alto.early_exit import nonfinite
from alto.early_exit.noise import is_better, is_within_noise, leading_group, ordered
from alto.early_exit.policy import Policy
from alto.early_exit.progress import point_at_share
from alto.early_exit.smoothing import Ema
from alto.errors import RunError
from alto.records import ExitDecision, ExitReason, LossPoint, Rung, RungResult, Standing, StartValue
from alto.spec.rungs import rung_step

__all__ = ["Selection"]

# Above every score.
UNBEATABLE = sys.float_info.max

_ENDS_COMPETING = (ExitReason.DIVERGING, ExitReason.UNDERPERFORMING, ExitReason.STOPPED, ExitReason.FAILED)
"""Who ends for one of these stands at no later rung; by overfitting, or by a rule of a user, with its best."""


@dataclass(slots=True)
class _Runner:
    """What the selection knows of one job."""

    total_steps: int
    ema: Ema
    loss_scale: str = ""
    start: StartValue | None = None
    was_ranked: bool = False
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
        """Steps done as of the latest evaluation."""
        return self.history[-1].step if self.history else 0

    @property
    def stands_with(self) -> LossPoint | None:
        """The evaluation it competes with where no other is laid down; None if it does not compete."""
        if self.trains:
            return self.history[-1] if self.history else None
        return self.best if self.competes else None

    def ended_after(self, point: LossPoint) -> bool:
        """Whether it went on after ``point``, one of its evaluations, and then ended, other than by a user."""
        if self.decision is None:
            return self.finished and self.steps > point.step
        if self.decision.reason is ExitReason.FAILED:
            return True  # in what came after: a step or an evaluation that fails is not counted
        return self.decision.step > point.step and self.decision.reason is not ExitReason.STOPPED


class Selection:
    """Follows all jobs of a task and decides which end; the executor and the replay run this very code.

    Told what happened (`observe_losses`, `observe`, `end`), it answers who ends. The executor's loop::

        while selection.training:
            job = any of selection.training that does not wait, or of selection.certain_to_be_kept()
            train it to its next evaluation step, never past selection.next_stop(job), or selection.furthest_stop(job)
            verdict = selection.observe_losses(job, first_step, losses)
            verdict = verdict or selection.observe(job, step, validation_loss, score)
            while selection.rung_ready():
                rung_result = selection.select()

    Nothing depends on the order in which jobs are told of: a job is judged by its own history, and a rung waits until
    every job that still trains has been evaluated at it. The state is a function of the calls, so feeding the same
    journal again rebuilds it (`alto.early_exit.audit.selection_of`).

    A job that waits may train on where its place is certain, as far as the rung after. The rung ranks it all the same
    by what it was worth there, whatever has become of it: verdicts past a rung change nothing of that rung.

    A job ends by a verdict, or it finishes: at its last evaluation it has nothing left to save, so there only a
    non-finite loss is a verdict. At a rung a job that trains stands with its latest evaluation, one that overfit
    or finished with its best. A job that diverged, was stopped, failed or was once not kept stands no more. Where the
    policy compares equal shares, its value at a rung is interpolated to exactly the rung's share of its steps.

    Verdicts on one job look at its losses; who is better, of evaluations and of jobs, is a matter of their scores.

    Args:
        policy: Judges and ranks.
        ema_alpha: Weight of the newest training loss in its running average, in (0, 1].
        total_steps: Steps of every job, by job id.
        loss_scales: What decides the scale of a job's loss (:func:`alto.spec.metric.loss_scale`), by job id; the same
            for all that are not named.

    Raises:
        RunError: From every method that is told of something, if that cannot have happened now.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        ema_alpha: float,
        total_steps: Mapping[str, int],
        loss_scales: Mapping[str, str] | None = None,
    ) -> None:
        self.policy = policy
        self._ema_alpha = ema_alpha
        scales = loss_scales or {}
        self._runners = {
            job: _Runner(steps, Ema(ema_alpha), loss_scale=scales.get(job, "")) for job, steps in total_steps.items()
        }
        self._rungs_held = 0
        self._num_changes = 0

    def observe_losses(self, job: str, first_step: int, losses: Sequence[float]) -> ExitDecision | None:
        """Take in the training losses of consecutive steps from ``first_step`` (1-based) on.

        The first loss that is not finite ends the job at its step; losses after it are not looked at.
        """
        runner = self._runners[job]
        due = runner.ema.count + 1
        _require(runner.trains, f"{job} to train, found that it has ended")
        _require(
            not losses or not self.is_waiting(job) or first_step + len(losses) - 1 <= self.furthest_stop(job),
            f"{job} to wait for its rung, found that it trained on",
        )
        _require(first_step == due, f"step {due} of {job}, found step {first_step}")
        for step, loss in enumerate(losses, start=first_step):
            verdict = nonfinite.judge_step_loss(job, step, loss)
            if verdict is not None:
                self.end(verdict)
                return verdict
            runner.ema.update(loss)
        return None

    def observe_base(self, job: str, start: StartValue) -> None:
        """Take in what validation gives with the frozen base alone, before the first evaluation of ``job``."""
        runner = self._runners[job]
        _require(not runner.history, f"the base's validation before the first of {job}, found it after one")
        runner.start = start

    def observe(
        self, job: str, step: int, validation_loss: float, score: float = 0.0, score_rows: Sequence[float] = ()
    ) -> ExitDecision | None:
        """Take in an evaluation after ``step`` steps, whose training losses must all have been observed.

        Args:
            score: What :func:`alto.spec.metric.score_of` says of it, a finite number; without one the loss decides
                alone.
            score_rows: The metric on every validation row, where it is known.
        """
        runner = self._runners[job]
        done, last = runner.ema.count, runner.steps
        _require(runner.trains, f"{job} to train, found that it has ended")
        _require(step == done, f"an evaluation of {job} after the {done} steps it has done, found one after {step}")
        _require(last < step <= runner.total_steps, f"an evaluation of {job} after step {last}, found one at {step}")
        assert runner.ema.value is not None
        point = LossPoint(
            job=job,
            step=step,
            total_steps=runner.total_steps,
            train_ema=runner.ema.value,
            validation_loss=validation_loss,
            score=score,
            score_rows=tuple(score_rows),
            loss_scale=runner.loss_scale,
            start_loss=None if runner.start is None else runner.start.validation_loss,
        )
        runner.history.append(point)
        self._num_changes += 1
        verdict = nonfinite.judge_point(point)
        if verdict is None:
            if runner.peak is None or point.score > runner.peak.score:
                runner.peak = point
            # Steps that are each within noise of the one before must not lead away from the best score.
            if runner.best is None or (is_better(point, runner.best) and is_within_noise(point, runner.peak)):
                runner.best = point
            if step == runner.total_steps:
                runner.finished = True
                return None
            verdict = self.policy.judge(runner.history[runner.judged_from :])
        if verdict is not None:
            self.end(verdict)
        return verdict

    def end(self, decision: ExitDecision) -> None:
        """End a job: by a verdict of the policy, or from outside (``stopped``, ``failed``)."""
        runner = self._runners[decision.job]
        _require(runner.trains, f"{decision.job} to train, found that it has ended")
        self._num_changes += 1
        runner.decision = decision
        runner.competes = decision.reason not in _ENDS_COMPETING

    def add(self, job: str, total_steps: int, loss_scale: str = "") -> None:
        """Let another job in, before its first step; it takes part in every rung that is still to be held."""
        _require(job not in self._runners, f"a new job, found that {job} is there already")
        self._num_changes += 1
        self._runners[job] = _Runner(total_steps, Ema(self._ema_alpha), loss_scale=loss_scale)

    def reopen(self, job: str) -> None:
        """Let a job that was ended train on: in every rung still to be held, and judged by what it does from now on."""
        runner = self._runners[job]
        verdict = runner.decision
        _require(verdict is not None, f"{job} to have been ended early, found that it has not")
        assert verdict is not None
        _require(
            all(map(math.isfinite, verdict.evidence.values())),
            f"{job} to have finite losses, found that it ended with one that is not, so there is nothing to go on from",
        )
        self._num_changes += 1
        runner.decision = None
        runner.competes = True
        runner.judged_from = len(runner.history)

    @property
    def jobs(self) -> tuple[str, ...]:
        """All jobs, in the order they were given."""
        return tuple(self._runners)

    @property
    def training(self) -> tuple[str, ...]:
        """Jobs that have neither ended nor finished, waiting ones included."""
        return tuple(job for job, runner in self._runners.items() if runner.trains)

    @property
    def next_rung(self) -> Rung | None:
        """The rung that is to be held next; None when there is none left."""
        rungs = self.policy.rungs
        return rungs[self._rungs_held] if self._rungs_held < len(rungs) else None

    @property
    def rungs_held(self) -> int:
        """Rungs held so far, which is also the index of `next_rung`."""
        return self._rungs_held

    @property
    def num_changes(self) -> int:
        """Rises with everything that may change who trains; only training losses that end nobody do not count."""
        return self._num_changes

    def next_stop(self, job: str) -> int:
        """The step at which ``job`` waits for the next rung; its last step if no rung is left."""
        return self._stop(job, self._rungs_held)

    def furthest_stop(self, job: str) -> int:
        """The step past which ``job`` must not train before the next rung is held, certain of its place or not."""
        return self._stop(job, self._rungs_held + 1)

    def is_training(self, job: str) -> bool:
        """Whether ``job`` has neither ended nor finished; a waiting job counts."""
        return self._runners[job].trains

    def is_waiting(self, job: str) -> bool:
        """Whether ``job`` has been evaluated at the next rung and waits for the others."""
        runner = self._runners[job]
        return runner.trains and self.next_rung is not None and runner.steps >= self.next_stop(job)

    def certain_to_be_kept(self) -> frozenset[str]:
        """Jobs that wait and may train on all the same: the next rung will keep them, whatever the others do.

        That is so where a job would be kept if all that are still to come were better. Only what users do may undo it:
        jobs that they add, reopen or stop.
        """
        coming = {job for job in self.training if not self.is_waiting(job)}
        present = [standing for standing in self.standings() if standing.job not in coming]
        if self.next_rung is None or not any(standing.is_training for standing in present):
            return frozenset()
        if any(standing.score_rows for standing in present):
            return frozenset()  # a job still to come may change who lies within noise of whom
        better = [
            Standing(job=job, step=0, validation_loss=0.0, score=UNBEATABLE, is_training=True) for job in sorted(coming)
        ]
        kept = self._ranked([*present, *better]).kept
        return frozenset(
            job for job in kept if self.is_waiting(job) and self._runners[job].steps < self.furthest_stop(job)
        )

    def rung_ready(self) -> bool:
        """Whether the next rung can be held: somebody has reached it, and all who train wait at it."""
        return all(map(self.is_waiting, self.training)) and any(map(self._stands_at_rung, self._runners))

    def standings(self) -> tuple[Standing, ...]:
        """How everybody who competes stands now, by job id."""
        standings = []
        for job, runner in sorted(self._runners.items()):
            point = self._at_rung(job) if self._stands_at_rung(job) else runner.stands_with
            if point is not None:
                standings.append(
                    Standing(
                        job=job,
                        step=runner.ema.count,
                        validation_loss=point.validation_loss,
                        score=point.score,
                        score_rows=point.score_rows,
                        loss_scale=point.loss_scale,
                        start_loss=point.start_loss,
                        is_training=runner.trains,
                    )
                )
        return tuple(standings)

    def select(self) -> RungResult:
        """Hold the next rung: rank, end those dropped, and let the others train on."""
        _require(self.rung_ready(), "every job that trains to wait at the rung, found that some do not")
        standings = self.standings()
        rung_result = self._ranked(standings)
        for decision in rung_result.dropped:
            self.end(decision)
        for standing in standings:
            self._runners[standing.job].competes &= standing.job in rung_result.kept
            self._runners[standing.job].was_ranked = True
        self._num_changes += 1
        self._rungs_held += 1
        return rung_result

    def start_of(self, job: str) -> StartValue | None:
        """What validation gave before the first step of ``job``; None where it is not known."""
        return self._runners[job].start

    def decision_on(self, job: str) -> ExitDecision | None:
        """The verdict that ended ``job``; None if it trains or did all its steps."""
        return self._runners[job].decision

    def history(self, job: str) -> tuple[LossPoint, ...]:
        """All evaluations of ``job``, oldest first."""
        return tuple(self._runners[job].history)

    def best(self, job: str) -> LossPoint | None:
        """The evaluation that ``job`` competes with in the end, the earliest of equals; None before any.

        One with a better score by the task's metric takes its place, and one with a lower validation loss whose score
        lies within noise of it and of the best score so far.
        """
        return self._runners[job].best

    def winner(self) -> LossPoint | None:
        """The best evaluation of all jobs, however they ended; None if there is none."""
        return next(iter(self.leaders(1)), None)

    def leaders(self, count: int) -> list[LossPoint]:
        """The best evaluations of the best ``count`` jobs, however they ended; ties go to the lower job id."""
        bests = [runner.best for runner in self._runners.values() if runner.best is not None]
        return ordered(bests)[:count]

    def within_noise_of_winner(self) -> list[LossPoint]:
        """The best evaluations of other jobs, with other scores than the winner's, that the validation rows cannot tell
        from the best score; best score first."""
        group = leading_group(runner.best for runner in self._runners.values() if runner.best is not None)
        others = [point for point in group if point.score != group[0].score]
        return sorted(others, key=lambda point: (point.sort_key, point.job))

    def _ranked(self, standings: Sequence[Standing]) -> RungResult:
        """The outcome of the next rung, if ``standings`` were all who compete at it."""
        entered = {job for job, runner in self._runners.items() if runner.was_ranked}
        return self.policy.select(self._rungs_held, standings, len(entered | {one.job for one in standings}))

    def _stop(self, job: str, rung_index: int) -> int:
        rungs, total_steps = self.policy.rungs, self._runners[job].total_steps
        return rung_step(rungs[rung_index], total_steps) if rung_index < len(rungs) else total_steps

    def _at_rung(self, job: str) -> LossPoint | None:
        """How ``job`` stood at the next rung; None if it has not reached it, or no rung is left."""
        if self.next_rung is None:
            return None
        runner = self._runners[job]
        if self.policy.equal_shares:
            return point_at_share(runner.history, self.next_rung, runner.total_steps, runner.start)
        return next((point for point in runner.history if point.step >= self.next_stop(job)), None)

    def _stands_at_rung(self, job: str) -> bool:
        """Whether ``job`` waits at the next rung, or trained past it and ended there by what it did."""
        point, runner = self._at_rung(job), self._runners[job]
        if point is None:
            return False
        if runner.finished and runner.steps == point.step:
            # It finished by coming here. Compared with others at equal shares it must not have the better of it.
            return self.policy.equal_shares
        return runner.trains or runner.ended_after(point)


def _require(condition: bool, expected_and_found: str) -> None:
    if not condition:
        raise RunError(
            f"Early exit: expected {expected_and_found}. Tell the selection of every event once and in order."
        )
