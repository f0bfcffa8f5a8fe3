"""Adds the jobs that a task's search chooses while it runs, and ends the task where its budget is spent."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Mapping
from typing import Any

from alto.errors import SpecError
from alto.executor.clone import next_id
from alto.executor.job_state import JobState
from alto.executor.lifecycle import JobLifecycle
from alto.executor.task_state import TaskState
from alto.records import ExitDecision, ExitReason, LossPoint, RungResult
from alto.search import Trial, forks_of, next_configuration
from alto.spec import Job, JobConfig
from alto.spec.metric import LOSS
from alto.spec.search_space import Sampled

__all__ = ["EXPLORING_SHARE", "Exploration"]

EXPLORING_SHARE = 0.4
"""Share of a budget of samples, time or money from which on slots that become free are left to the jobs that train, so
that the best of them come to their end; none is added while any job trains. Source: two searches of 150 s."""


class Exploration:
    """Carries out what the search of a task decides.

    Args:
        state: Of the task.
        lifecycle: Adds and ends jobs.
        spent_before_s: Seconds that the task took before it was interrupted.
    """

    def __init__(self, state: TaskState, lifecycle: JobLifecycle, *, spent_before_s: float) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._task = state.context.task
        self._spent_before_s = spent_before_s
        self._began = time.monotonic()
        self._is_exhausted = False

    def suggest(self, num_slots: int) -> None:
        """Add jobs for the slots that no job of the task can use now.

        Args:
            num_slots: Slots that the task may have.
        """
        search = self._task.search
        if search.algorithm != "tpe":
            return
        most = search.max_jobs(self._task.search_space)
        while not self._is_exhausted and len(self._chosen()) < most:
            # A suggestion with a larger adapter may leave fewer slots.
            if self._num_able() >= min(num_slots, self._state.slot_manager.num_slots):
                return
            self._is_exhausted = not self._add_suggestion()

    def exchange(self, rung_index: int, result: RungResult) -> None:
        """Let the best of a population continue in the place of those that ended at a rung."""
        search, state = self._task.search, self._state
        if search.algorithm != "pbt":
            return
        kept = [job for job in result.kept if state.selection.is_training(job)]
        forks = forks_of(
            kept,
            [decision.job for decision in result.dropped],
            {job: state.jobs[job].config.to_dict() for job in kept},
            self._bounds(),
            exchanged=search.exchanged,
            seed=self._task.data_seed,
            rung=rung_index,
        )
        for fork in forks:
            origin = state.jobs[fork.origin]
            config = self._changed(origin.config, fork.changes)
            self._lifecycle.add_fork(self._job(config, {}), origin, fork.replaces)

    def spent_share(self) -> float:
        """Share of its samples, its time or its money that the task has spent, the largest of them; 0 without limits.
        Time is this process's."""
        budget = self._task.search.budget
        max_duration_s = budget.max_duration_s(self._state.context.ranks.size)
        share = 0.0
        if max_duration_s is not None:
            share = (self._spent_before_s + time.monotonic() - self._began) / max_duration_s
        if budget.samples is not None:
            samples = sum(job.samples_until(job.step) for job in self._state.jobs.values())
            share = max(share, samples / budget.samples)
        return share

    def end_all(self) -> None:
        """End every job that trains: the budget is spent."""
        selection = self._state.selection
        for job_id in selection.training:
            job = self._state.jobs[job_id]
            decision = ExitDecision(job=job.id, step=job.step, reason=ExitReason.BUDGET)
            selection.end(decision)
            self._lifecycle.end(job, decision)

    def _changed(self, config: JobConfig, changes: Mapping[str, float]) -> JobConfig:
        """``config`` with those of ``changes`` that its other settings allow: no dropout comes to adapters on experts,
        for instance."""
        for key, value in changes.items():
            with contextlib.suppress(SpecError):
                config = self._task.job_config({**config.to_dict(), key: value})
        return config

    def _num_able(self) -> int:
        """Jobs that a slot is of use to now: those that have not ended and do not wait at a rung."""
        selection, ahead = self._state.selection, self._state.ahead
        return sum(not selection.is_waiting(job) or job in ahead for job in selection.training)

    def _chosen(self) -> list[JobState]:
        """The jobs that the search has chosen, oldest first."""
        return [job for job in self._state.jobs.values() if job.planned.job.values]

    def _add_suggestion(self) -> bool:
        """Add one job; false where the search space has no further one."""
        context = self._state.context
        values = context.ranks.broadcast(self._next_values() if context.ranks.is_first else None, dict[str, Any] | None)
        if values is None:
            return False
        config = self._task.job_config({**self._task.fixed, **values})
        self._lifecycle.add_suggestion(self._job(config, values))
        return True

    def _next_values(self) -> dict[str, Any] | None:
        space, seed, trials = self._task.search_space, self._task.data_seed, self._trials()
        known = {job.config for job in self._state.jobs.values()}
        while True:
            values = next_configuration(space, trials, seed)
            # Two spellings, such as 2*r and a number, may mean the same.
            if values is None or self._task.job_config({**self._task.fixed, **values}) not in known:
                return values
            trials.append(Trial(values=values, has_ended=True))

    def _trials(self) -> list[Trial]:
        return [self._trial(job) for job in self._chosen()]

    def _trial(self, job: JobState) -> Trial:
        """How far a job came, by its values at exactly equal shares of the steps."""
        selection = self._state.selection
        decision, best = selection.decision_on(job.id), selection.best(job.id)
        reached = map(self._value_of, selection.at_rungs(job.id))
        has_ended = not selection.is_training(job.id)
        is_done = has_ended and decision is None and best is not None
        return Trial(
            values=job.planned.job.values,
            losses=tuple(itertools.takewhile(math.isfinite, reached)),
            final=self._value_of(best) if is_done and best is not None else None,
            has_ended=has_ended,
            is_infeasible=decision is not None and decision.reason == ExitReason.FAILED,
        )

    def _value_of(self, point: LossPoint) -> float:
        """Lower is better."""
        return point.validation_loss if self._task.metric == LOSS else -point.score

    def _job(self, config: JobConfig, values: dict[str, Any]) -> JobState:
        context = self._state.context
        job = Job(id=next_id(self._state.jobs), config=config, values=values)
        return JobState(planned=context.plan(job), context=context)

    def _bounds(self) -> dict[str, tuple[float, float]]:
        """The ranges of the search space."""
        axes = (axis for group in self._task.search_space.groups for axis in group)
        return {axis.key: (axis.values.min, axis.values.max) for axis in axes if isinstance(axis.values, Sampled)}
