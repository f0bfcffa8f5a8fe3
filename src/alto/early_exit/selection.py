"""The state of one task's selection: jobs that train, jobs that wait at a rung, and ended jobs with their reasons."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from alto.early_exit import patterns
from alto.early_exit.noise import Repeated, leading_group, on_one_scale, ranked_configurations
from alto.early_exit.policy import Policy
from alto.early_exit.rungs import Rungs
from alto.early_exit.track import ENDS_COMPETING, Ema, JobTrack, failed_configurations
from alto.errors import RunError
from alto.records import ExitDecision, FinalistScore, LossPoint, RungResult, StartValue


class Selection:
    """The state of all jobs of a task, which decides which jobs end; the executor and the replay use the same code.

    Its methods `observe_losses`, `observe` and `end` take events and return verdicts. The executor's loop::

        rungs = selection.rungs
        while selection.training:
            job = any of selection.training that does not wait, or of rungs.certain_to_be_kept()
            train it to its next evaluation step, never past rungs.next_stop(job), or rungs.furthest_stop(job)
            verdict = selection.observe_losses(job, first_step, losses)
            verdict = verdict or selection.observe(job, step, validation_loss, score)
            while rungs.is_ready():
                rung_result = selection.select()

    The order in which jobs are observed does not matter: a job is judged by its own history, and a rung waits until
    every job that still trains has been evaluated at it. The state is a function of the calls, so feeding the same
    journal again rebuilds it (`alto.early_exit.journal.selection_of`).

    A job ends by a verdict, or it finishes: at its last evaluation no training time can be saved any more, so only a
    loss that is not finite can end it there.

    Verdicts on one job use its losses; evaluations and jobs are ordered by their scores.

    Args:
        ema_alpha: Weight of the newest training loss in its running average, in (0, 1].
        loss_scales: Scale of a job's loss (:func:`alto.spec.scoring.loss_scale`), by job id; jobs without an entry have
            equal scales.
        configuration_of: Id of the configuration, by job that repeats one with another seed; it is the id of one of the
            jobs. Rungs rank configurations by the means of their jobs.
        row_weights: Weight of every validation row, in the order of evaluation; empty if all evaluations are on all
            rows.

    Attributes:
        rungs: The rungs, and the jobs that compete at them.

    Raises:
        RunError: Raised by every observing method, if the event is not possible in the current state.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        ema_alpha: float,
        total_steps: Mapping[str, int],
        loss_scales: Mapping[str, str] | None = None,
        configuration_of: Mapping[str, str] | None = None,
        row_weights: Sequence[float] = (),
    ) -> None:
        self.policy = policy
        self._row_weights = row_weights
        self._ema_alpha = ema_alpha
        scales = loss_scales or {}
        self._configuration_of = dict(configuration_of or {})
        self._tracks = {
            job: JobTrack(steps, Ema(ema_alpha), loss_scale=scales.get(job, "")) for job, steps in total_steps.items()
        }
        self.rungs = Rungs(policy, self._tracks, self._configuration_of, row_weights)
        self._num_changes = 0
        self._measured: set[str] = set()

    # -- events, and the verdicts that follow ----------------------------------------------------------------------

    def observe_losses(
        self,
        job: str,
        first_step: int,
        losses: Sequence[float],
        metrics: Mapping[str, Sequence[float]] | None = None,
    ) -> ExitDecision | None:
        """Observe the training losses of consecutive steps from ``first_step`` (1-based) on.

        The first loss that is not finite ends the job at its step; later losses are ignored.

        Args:
            metrics: Other measurements of each of these steps, by name; rules see them at the next evaluation.
        """
        track = self._tracks[job]
        expected = track.ema.count + 1
        _require(track.trains, f"{job} to train, found that it has ended")
        last = first_step + len(losses) - 1
        _require(
            not losses or not self.rungs.is_waiting(job) or last <= self.rungs.furthest_stop(job),
            f"{job} to wait for its rung, found that it continued",
        )
        _require(first_step == expected, f"step {expected} of {job}, found step {first_step}")
        for step, loss in enumerate(losses, start=first_step):
            verdict = patterns.judge_step_loss(job, step, loss)
            if verdict is not None:
                self.end(verdict)
                return verdict
            track.ema.update(loss)
        track.add_metrics(metrics or {})
        return None

    def observe_base(self, job: str, start: StartValue) -> None:
        """Observe the evaluation of ``job`` before its first step; call it before any other evaluation of the job."""
        track = self._tracks[job]
        _require(not track.history, f"the evaluation of the base before all evaluations of {job}, found it after one")
        track.start = start

    def observe(
        self,
        job: str,
        step: int,
        validation_loss: float,
        score: float = 0.0,
        score_rows: Sequence[float] = (),
        loss_rows: Sequence[float] = (),
    ) -> ExitDecision | None:
        """Observe an evaluation after ``step`` steps, whose training losses must all have been observed.

        Args:
            score: Result of :func:`alto.spec.scoring.score_of`, a finite number; 0 if only the loss decides.
            score_rows: The metric on every validation row, if known.
            loss_rows: Loss of every row of the evaluation, in the order of evaluation; empty if evaluations are on all
                rows.
        """
        track = self._tracks[job]
        done, last = track.ema.count, track.steps
        _require(track.trains, f"{job} to train, found that it has ended")
        _require(step == done, f"an evaluation of {job} after the {done} steps it has done, found one after {step}")
        _require(last < step <= track.total_steps, f"an evaluation of {job} after step {last}, found one at {step}")
        assert track.ema.value is not None, "it has trained"
        point = LossPoint(
            job=job,
            step=step,
            total_steps=track.total_steps,
            train_ema=track.ema.value,
            validation_loss=validation_loss,
            score=score,
            score_rows=tuple(score_rows),
            loss_scale=track.loss_scale,
            start_loss=None if track.start is None else track.start.validation_loss,
            loss_rows=tuple(loss_rows),
            step_metrics=track.take_metrics(),
        )
        track.history.append(point)
        self._num_changes += 1
        verdict = patterns.judge_point(point)
        if verdict is None:
            track.keep_best(point, self._row_weights)
            if step == track.total_steps:
                track.finished = True
                return None
            judged = on_one_scale(track.history[track.judged_from :], self._row_weights)
            verdict = self.policy.judge(judged) or self.rungs.judge_late(job)
        if verdict is not None:
            self.end(verdict)
        return verdict

    def finish(self, job: str) -> None:
        """Record that ``job`` has done all its steps. Use this method only if there are no validation rows."""
        track = self._tracks[job]
        _require(track.trains, f"{job} to train, found that it has ended")
        _require(not track.history, f"{job} to have no evaluations, found some: the last evaluation finishes the job")
        _require(track.ema.count == track.total_steps, f"all steps of {job}, found {track.ema.count} of them")
        self._num_changes += 1
        track.finished = True

    def observe_measured(self, job: str, validation_loss: float, loss_rows: Sequence[float]) -> None:
        """Observe the best checkpoint of ``job`` on more rows, after all jobs have ended; measured jobs come before all
        others in the final ranking."""
        _require(not self.training, "all jobs to have ended, found that some still train")
        best = self._tracks[job].best
        assert best is not None, f"{job} was evaluated"
        self._tracks[job].best = replace(best, validation_loss=validation_loss, loss_rows=tuple(loss_rows))
        self._measured.add(job)

    def observe_scores(self, scores: Sequence[FinalistScore]) -> None:
        """Observe the scores of the answers of the jobs at the next rung, which ranks by them.

        Pass no scores if the answers could not be scored; then the rung ranks by the metric."""
        _require(
            self.rungs.is_ready(), "every job that trains to wait at the rung that is scored, found that some do not"
        )
        self.rungs.score(scores)

    def select(self) -> RungResult:
        """Decide the next rung: rank the jobs, end those that are dropped, and let the others continue."""
        _require(self.rungs.is_ready(), "every job that trains to wait at the rung, found that some do not")
        result = self.rungs.hold()
        for decision in result.dropped:
            self.end(decision)
        self._num_changes += 1
        return result

    def end(self, decision: ExitDecision) -> None:
        """End a job: by a verdict of the policy, or from outside (``stopped``, ``failed``, ``budget``)."""
        track = self._tracks[decision.job]
        _require(track.trains, f"{decision.job} to train, found that it has ended")
        self._num_changes += 1
        track.decision = decision
        track.competes &= decision.reason not in ENDS_COMPETING

    def add(self, job: str, total_steps: int, loss_scale: str = "", *, catches_up: bool = False) -> None:
        """Add a job before its first step; it takes part in every rung that is still to be decided.

        Args:
            catches_up: Whether rungs do not wait for this job until it has reached them. A rung that was decided before
                ranks it alone, as soon as it gets there, among all jobs that were ever ranked at that rung.
        """
        _require(job not in self._tracks, f"a new job, found that {job} already exists")
        self._num_changes += 1
        late_rung = 0 if catches_up else None
        self._tracks[job] = JobTrack(total_steps, Ema(self._ema_alpha), loss_scale=loss_scale, late_rung=late_rung)

    def fork(self, job: str, origin: str) -> None:
        """Add a job that continues from the current state of ``origin``, which trains.

        Everything observed of ``origin`` counts for both, but the new job competes in the end with its own
        evaluations."""
        _require(job not in self._tracks, f"a new job, found that {job} already exists")
        _require(self._tracks[origin].trains, f"{origin} to train, found that it has ended")
        self._num_changes += 1
        self._tracks[job] = self._tracks[origin].forked(job)

    def reopen(self, job: str) -> None:
        """Reopen a job that was ended: it takes part in every rung still to be decided, and only its later evaluations
        are judged."""
        track = self._tracks[job]
        _require(track.decision is not None, f"{job} to have been ended early, found that it has not")
        assert track.decision is not None
        _require(
            all(math.isfinite(value) for value in track.decision.evidence.values() if not isinstance(value, str)),
            f"{job} to have finite losses, found that it ended with a loss that is not finite, so it cannot be resumed",
        )
        self._num_changes += 1
        track.decision = None
        track.competes = True
        track.judged_from = len(track.history)

    # -- the state -------------------------------------------------------------------------------------------------

    @property
    def jobs(self) -> tuple[str, ...]:
        """All jobs, in the order in which they were given."""
        return tuple(self._tracks)

    @property
    def training(self) -> tuple[str, ...]:
        """Jobs that have neither ended nor finished, waiting ones included."""
        return tuple(job for job, track in self._tracks.items() if track.trains)

    @property
    def num_changes(self) -> int:
        """A version number of the state. It rises with every change except training losses that do not end a job."""
        return self._num_changes

    def is_training(self, job: str) -> bool:
        """Return whether ``job`` has neither ended nor finished; a waiting job counts."""
        return self._tracks[job].trains

    def start_of(self, job: str) -> StartValue | None:
        """Return the evaluation before the first step of ``job``; None if unknown."""
        return self._tracks[job].start

    def decision_on(self, job: str) -> ExitDecision | None:
        """Return the verdict that ended ``job``; None if it trains or did all its steps."""
        return self._tracks[job].decision

    def history(self, job: str) -> tuple[LossPoint, ...]:
        """Return all evaluations of ``job``, oldest first."""
        return tuple(self._tracks[job].history)

    def best(self, job: str) -> LossPoint | None:
        """Return the evaluation that ``job`` competes with in the end, the earliest of equals; None before any.

        It is replaced by an evaluation with a better score by the task's metric, or with a lower validation loss and a
        score within noise of it and of the best score so far.
        """
        return self._tracks[job].best

    # -- the order of the jobs -----------------------------------------------------------------------------------

    def winner(self) -> LossPoint | None:
        """Return the best evaluation of all jobs, however they ended; None if there is none."""
        return next(iter(self.leaders(1)), None)

    def leaders(self, count: int) -> list[LossPoint]:
        """Return the best evaluations of the best ``count`` configurations, however their jobs ended."""
        return [group.members[0] for group in self._ranked_bests()[:count]]

    def front_runners(self) -> tuple[str, ...]:
        """Return the jobs that train, best first by their values at the last decided rung, or else by their best
        evaluations. Jobs without a value come last, those with most steps first."""
        at_rung = (self.rungs.at(job, self.rungs.held - 1) for job in self.training)
        points = [point for point in at_rung if point] or [best for best in map(self.best, self.training) if best]
        ranked = [group.members[0].job for group in ranked_configurations(points, {}, set())]
        others = sorted(set(self.training) - set(ranked), key=lambda job: (-self._tracks[job].ema.count, job))
        return (*ranked, *others)

    def within_noise_of_winner(self) -> list[LossPoint]:
        """Return the best evaluations of other jobs whose scores differ from the winner's, but are within noise of the
        best score; best score first."""
        ranked, failed = self._ranked_bests(), failed_configurations(self._tracks, self._configuration_of)
        best_of = {group.mean.job: group.members[0] for group in ranked}
        competing = [one.mean for one in ranked if one.mean.job not in failed] or [one.mean for one in ranked]
        group = leading_group(competing)
        others = [point for point in group if point.score != group[0].score]
        return [best_of[point.job] for point in sorted(others, key=lambda point: (point.sort_key, point.job))]

    def _ranked_bests(self) -> list[Repeated[LossPoint]]:
        bests = on_one_scale([track.best for track in self._tracks.values() if track.best], self._row_weights)
        failed = failed_configurations(self._tracks, self._configuration_of)
        ranked = ranked_configurations(bests, self._configuration_of, failed)
        return sorted(ranked, key=lambda group: not self._measured.issuperset(one.job for one in group.members))


def _require(condition: bool, expected_and_found: str) -> None:
    if not condition:
        raise RunError(f"Early exit: expected {expected_and_found}. Report each event to the selection once, in order.")
