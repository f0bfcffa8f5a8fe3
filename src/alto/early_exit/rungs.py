"""The rungs of a task: which jobs compete at each, and which continue."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from alto.early_exit.noise import on_one_scale
from alto.early_exit.policy import Policy
from alto.early_exit.track import JobTrack, failed_configurations
from alto.records import Candidate, ExitDecision, FinalistScore, LossPoint, Rung, RungResult
from alto.spec import rung_step

UNBEATABLE = sys.float_info.max  # above every score


class Rungs:
    """The rungs of a task. A rung waits until every job that still trains has been evaluated at it.

    At a rung, a job that trains competes with its latest evaluation, a job that overfit or finished with its best one.
    A job that diverged, was stopped, failed or was not kept at a rung does not compete any more. If the policy compares
    equal shares, a job's value at a rung is interpolated to exactly the rung's share of its steps.

    A job that waits at a rung and is certain to be kept may continue to the rung after that one. The rung at which it
    waited still ranks it by its value at that rung: verdicts after a rung do not change that rung.

    Attributes:
        held: Number of decided rungs, which is also the index of `next`.
    """

    def __init__(
        self,
        policy: Policy,
        tracks: Mapping[str, JobTrack],
        configuration_of: Mapping[str, str],
        row_weights: Sequence[float],
    ) -> None:
        self.held = 0
        self._policy = policy
        self._tracks = tracks
        self._configuration_of = configuration_of
        self._row_weights = row_weights
        self._ranked_at: list[list[Candidate]] = []
        self._scores: dict[str, FinalistScore] = {}

    # -- the steps at which jobs wait ----------------------------------------------------------------------------

    @property
    def next(self) -> Rung | None:
        """The next rung; None when there is none left."""
        rungs = self._policy.rungs
        return rungs[self.held] if self.held < len(rungs) else None

    def next_stop(self, job: str) -> int:
        """Return the step at which ``job`` waits for the next rung; its last step if no rung is left."""
        return self._stop(job, self.held)

    def furthest_stop(self, job: str) -> int:
        """Return the step past which ``job`` must not train before the next rung, even if it is certain to be kept."""
        return self._stop(job, self.held + 1)

    def is_waiting(self, job: str) -> bool:
        """Return whether ``job`` has been evaluated at the next rung and waits for the others."""
        track = self._tracks[job]
        is_on_time = track.late_rung is None
        return track.trains and is_on_time and self.next is not None and track.steps >= self.next_stop(job)

    def is_ready(self) -> bool:
        """Return whether the next rung can be decided: a job has reached it, and all training jobs that are not late
        wait at it."""
        on_time = (job for job, track in self._tracks.items() if track.trains and track.late_rung is None)
        return all(map(self.is_waiting, on_time)) and any(map(self._is_at_next_rung, self._tracks))

    # -- who competes ----------------------------------------------------------------------------------------------

    def at(self, job: str, index: int) -> LossPoint | None:
        """Return the value of ``job`` at rung number ``index``; None if it has not reached it or there is no such
        rung."""
        if not 0 <= index < len(self._policy.rungs):
            return None
        weights = self._row_weights if self._policy.equal_shares else None
        return self._tracks[job].at_rung(self._policy.rungs[index], weights)

    def reached(self, job: str) -> tuple[LossPoint, ...]:
        """Return the values of ``job`` at the rungs it has reached, decided or not, as they are compared there."""
        points = (self.at(job, index) for index in range(len(self._policy.rungs)))
        return tuple(itertools.takewhile(lambda point: point is not None, points))  # type: ignore[arg-type]

    def candidates(self) -> tuple[Candidate, ...]:
        """Return the states of all jobs that compete at the next rung, by job id."""
        points = []
        for job, track in sorted(self._tracks.items()):
            point = self.at(job, self.held) if self._is_at_next_rung(job) else track.ranking_point
            if point is not None and track.late_rung is None:
                points.append(point)
        return tuple(
            self._tracks[point.job].candidate(point, self._scores.get(point.job))
            for point in on_one_scale(points, self._row_weights)
        )

    # -- who continues ---------------------------------------------------------------------------------------------

    def score(self, scores: Sequence[FinalistScore]) -> None:
        """Rank jobs at the next rung by ``scores``, the scores of their answers; without scores, by the metric."""
        self._scores = {score.job: score for score in scores}

    def hold(self) -> RungResult:
        """Decide the next rung: rank the jobs. The caller ends the jobs that it drops."""
        candidates = self.candidates()
        result = self._select(self.held, candidates)
        for candidate in candidates:
            self._tracks[candidate.job].competes &= candidate.job in result.kept
            self._tracks[candidate.job].was_ranked = True
        self._scores = {}
        self._ranked_at.append(list(candidates))
        self.held += 1
        return result

    def certain_to_be_kept(self) -> frozenset[str]:
        """Return the waiting jobs that may continue, because the next rung keeps them for any results of the others.

        A job is certain if it would be kept even if all jobs still to come were better. Only users can undo this.
        """
        coming = {job for job, track in self._tracks.items() if track.trains and not self.is_waiting(job)}
        present = [candidate for candidate in self.candidates() if candidate.job not in coming]
        if self.next is None or not any(candidate.is_training for candidate in present):
            return frozenset()
        may_change = self.next.ends_clear_losers or any(candidate.score_rows for candidate in present)
        if may_change or self._configuration_of:
            # A job still to come may change a configuration's mean, or which jobs are within noise or clearly behind.
            return frozenset()
        better = [Candidate(job=job, step=0, validation_loss=0.0, score=UNBEATABLE) for job in sorted(coming)]
        kept = self._select(self.held, [*present, *better]).kept
        return frozenset(
            job for job in kept if self.is_waiting(job) and self._tracks[job].steps < self.furthest_stop(job)
        )

    def judge_late(self, job: str) -> ExitDecision | None:
        """Return the verdict of the decided rungs that a late job has reached now; None if it continues."""
        track = self._tracks[job]
        while track.late_rung is not None:
            point = self.at(job, track.late_rung)
            if track.late_rung == len(self._policy.rungs) or (point is not None and track.late_rung == self.held):
                track.late_rung = None  # it waits at the next rung with the others
                break
            if point is None:
                break
            candidate, ranked = track.candidate(point), self._ranked_at[track.late_rung]
            ranked.append(candidate)
            result = self._select(track.late_rung, ranked)
            track.was_ranked = True
            if job not in result.kept:
                verdict = next(decision for decision in result.dropped if decision.job == job)
                progress = self._policy.rungs[track.late_rung].progress
                return replace(verdict, evidence={**verdict.evidence, "progress": progress})
            track.late_rung += 1
        return None

    def _select(self, index: int, candidates: Sequence[Candidate]) -> RungResult:
        entered = {job for job, track in self._tracks.items() if track.was_ranked} | {one.job for one in candidates}
        return self._policy.select(
            index,
            candidates,
            len({self._configuration_of.get(job, job) for job in entered}),
            configuration_of=self._configuration_of,
            failed=failed_configurations(self._tracks, self._configuration_of),
        )

    def _stop(self, job: str, index: int) -> int:
        rungs, total_steps = self._policy.rungs, self._tracks[job].total_steps
        return rung_step(rungs[index], total_steps) if index < len(rungs) else total_steps

    def _is_at_next_rung(self, job: str) -> bool:
        """Return whether ``job`` waits at the next rung, or trained past it and a verdict ended it there."""
        point, track = self.at(job, self.held), self._tracks[job]
        if point is None or track.late_rung is not None:
            return False
        return track.is_at_rung_of(point, equal_shares=self._policy.equal_shares)
