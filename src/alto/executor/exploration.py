"""The search of a running task: adds the jobs that it chooses, and ends jobs when the budget is spent."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from alto.errors import JobCommandError, SpecError
from alto.executor.context import JobState
from alto.executor.lifecycle import JobLifecycle
from alto.executor.slot_manager import TrainingState
from alto.records import ExitReason, LossPoint, RungResult, Throughput
from alto.search import Need, TimeSpent, Trial, beyond_budget, forks_of, next_configuration
from alto.spec import JOB_FIELDS, LOSS, Job, JobConfig, Sampled, Task, find_method


def clone_job(origin: Job, changes: Mapping[str, Any], others: Collection[JobState], *, warm: bool, task: Task) -> Job:
    """Return a new job with the configuration of ``origin`` and ``changes`` to it.

    ``lora_alpha`` keeps its ratio to ``r`` unless it is given. A given number of epochs replaces ``max_steps``.

    Args:
        changes: New values by key, in any spelling of a job's keys and of the settings of the task's method.
        warm: Whether the clone starts from the weights of ``origin``; then it may have the configuration of another
            job.

    Raises:
        JobCommandError: Another job already has this configuration.
        SpecError: A change is not valid.
    """
    changes = find_method(task.method).canonical(changes, JOB_FIELDS, "the clone")
    values = origin.config.to_dict()
    if isinstance(changes.get("r"), int) and "lora_alpha" not in changes:
        values["lora_alpha"] *= changes["r"] / values["r"]
    if "num_train_epochs" in changes:
        values["max_steps"] = None
    values |= changes
    config = task.job_config(values)
    twin = next((job.id for job in others if job.config == config), None)
    if twin is not None and not warm:
        raise JobCommandError(
            f"expected a configuration that no other job has, found that {twin} has it; change a setting, or start "
            "from the job's weights"
        )
    return Job(id=next_id(job.id for job in others), config=config)


def describe_changes(origin: Job, clone: Job) -> str:
    """Return the settings that differ between the two jobs, as text."""
    before, after = origin.config.to_dict(), clone.config.to_dict()
    return ", ".join(f"{key}={after[key]}" for key in after if after[key] != before[key]) or "nothing changed"


def next_id(ids: Iterable[str]) -> str:
    """Return the id for a job that is added to the jobs with ``ids``."""
    numbers = [job.removeprefix("job-") for job in ids]
    return f"job-{max(map(int, numbers)) + 1:0{max(map(len, numbers))}d}"


EXPLORING_FRACTION = 0.4
"""Spent share of a budget (samples, time or money) from which the search adds no job while any job trains. Free slots
then go to the training jobs, so that the best of them reach their last step. Source: two searches of 150 s."""

_MARGIN = 0.05
"""Share by which the leading job may take longer than expected until its last step."""

_TURNS, _LEAST_TURNS = 64, 4
"""Number of latest turns whose durations are compared with their predictions, and the smallest number needed."""


class Exploration:
    """Carries out the decisions of a task's search.

    Args:
        spent_before_s: Seconds that the task took before it was interrupted.
        throughput: Measured duration of steps; None if it was not measured.
        clock: Returns the time in seconds; never goes back.
    """

    def __init__(
        self,
        state: TrainingState,
        lifecycle: JobLifecycle,
        *,
        spent_before_s: float,
        throughput: Throughput | None,
        clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._task = state.context.task
        self._spent_before_s = spent_before_s
        self._throughput = throughput
        self._clock = clock
        self._began = self._looked_at = clock()
        self._predicted_s = 0.0
        self._turns: deque[tuple[float, float]] = deque(maxlen=_TURNS)
        self._is_exhausted = False

    def suggest(self, num_slots: int) -> None:
        """Add jobs for slots that the current jobs cannot use now. ``num_slots`` is the task's maximum number of
        slots."""
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
        """Replace the jobs of a population that ended at a rung by copies of its best jobs."""
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

    def stepped(self, jobs: Sequence[JobState]) -> None:
        """Add the predicted duration of a step that ``jobs`` have taken together."""
        tokens = sum(job.step_tokens for job in jobs)
        self._predicted_s += 1.0 if self._throughput is None else self._throughput.duration_s(len(jobs), tokens)

    def evaluated(self, num_jobs: int) -> None:
        """Add the predicted duration of an evaluation of ``num_jobs`` jobs."""
        self._predicted_s += num_jobs * self._evaluation_s

    def look_at_clock(self) -> TimeSpent:
        """Return the time that the task has taken. Called once per turn, on the first rank."""
        now = self._clock()
        if self._predicted_s > 0:
            self._turns.append((now - self._looked_at, self._predicted_s))
        self._looked_at, self._predicted_s = now, 0.0
        # With too few turns, trust the measured throughput; without one, the slowdown is unknown.
        slowdown = 0.0 if self._throughput is None else 1.0
        if len(self._turns) >= _LEAST_TURNS:
            slowdown = sum(taken for taken, _ in self._turns) / sum(predicted for _, predicted in self._turns)
        return TimeSpent(
            spent_s=self._spent_before_s + now - self._began,
            slowdown=slowdown,
            turn_s=max((taken for taken, _ in self._turns), default=0.0),
        )

    def spent_fraction(self, time: TimeSpent) -> float:
        """Return the spent fraction of the task's budget: the largest for samples, time and money; 0 without limits."""
        fraction = 0.0
        if self._max_duration_s is not None:
            fraction = time.spent_s / self._max_duration_s
        if (most := self._task.search.budget.samples) is not None:
            fraction = max(fraction, self._num_samples / most)
        return fraction

    def keep_to_budget(self, time: TimeSpent) -> None:
        """End jobs so that the leading job can reach its last step within the budget; end all jobs if the budget is
        spent."""
        selection = self._state.selection
        if self.spent_fraction(time) >= 1:
            self._end(selection.training)
        elif self._is_limited:
            needs = {job: self._need(self._state.jobs[job], time) for job in selection.training}
            self._end(beyond_budget(selection.front_runners(), needs))

    def can_finish_another(self, time: TimeSpent) -> bool:
        """Return whether the remaining budget allows another job, as long as the longest, to reach its last step."""
        if not self._is_limited:
            return True
        jobs = self._state.jobs.values()
        return self.spent_fraction(time) < 1 and all(self._need(job, time, done=0).reserved < 1 for job in jobs)

    @property
    def _max_duration_s(self) -> float | None:
        return self._task.search.budget.max_duration_s(self._state.context.ranks.size)

    @property
    def _is_limited(self) -> bool:
        return self._max_duration_s is not None or self._task.search.budget.samples is not None

    @property
    def _num_samples(self) -> int:
        return sum(job.samples_until(job.step) for job in self._state.jobs.values())

    @property
    def _evaluation_s(self) -> float:
        """Predicted seconds of one evaluation of one job, including the test rows that it may read; 0 without a
        measurement."""
        if self._throughput is None:
            return 0.0  # the timed turns include it
        return self._throughput.eval_token_s * self._state.context.evaluation_tokens

    def _need(self, job: JobState, time: TimeSpent, *, done: int | None = None) -> Need:
        """Return the share of the remaining budget that ``job`` needs after ``done`` steps (None: after its current
        steps)."""
        done = job.step if done is None else done
        share = reserved = 0.0
        if self._max_duration_s is not None:
            left_s = max(self._max_duration_s - time.spent_s, 1e-9)
            need_s = time.slowdown * self._alone_s(job, done)
            share, reserved = need_s / left_s, ((1 + _MARGIN) * need_s + time.turn_s) / left_s
        if (most := self._task.search.budget.samples) is not None:
            left = max(most - self._num_samples, 1e-9)
            need = job.samples_until(job.total_steps) - job.samples_until(done)
            in_a_turn = sum(other.config.rows_per_step for other in self._state.competing())
            share, reserved = max(share, need / left), max(reserved, (need + in_a_turn) / left)
        return Need(share=share, reserved=reserved)

    def _alone_s(self, job: JobState, done: int) -> float:
        """Return the predicted seconds of the steps and evaluations after ``done`` if the job trains alone. Without a
        measurement, return the number of steps; the slowdown of the latest turns is then the seconds per step."""
        num_steps = job.total_steps - done
        if self._throughput is None:
            return float(num_steps)
        num_evaluations = job.planned.evaluations_after(done, len(self._state.context.data.validation))
        return num_steps * self._throughput.duration_s(1, job.step_tokens) + num_evaluations * self._evaluation_s

    def _end(self, jobs: Sequence[str]) -> None:
        """End jobs because of the budget."""
        for job in jobs:
            self._lifecycle.exit(self._state.jobs[job], ExitReason.BUDGET)

    def _changed(self, config: JobConfig, changes: Mapping[str, float]) -> JobConfig:
        """Return ``config`` with the ``changes`` that its other settings allow. For instance, adapters on experts allow
        no dropout."""
        for key, value in changes.items():
            with contextlib.suppress(SpecError):
                config = self._task.job_config({**config.to_dict(), key: value})
        return config

    def _num_able(self) -> int:
        """Return the number of jobs that can use a slot now: jobs that have not ended and do not wait at a rung."""
        selection, ahead = self._state.selection, self._state.ahead
        return sum(not selection.rungs.is_waiting(job) or job in ahead for job in selection.training)

    def _chosen(self) -> list[JobState]:
        """Return the jobs that the search has chosen, oldest first."""
        return [job for job in self._state.jobs.values() if job.planned.job.values]

    def _add_suggestion(self) -> bool:
        """Add one job; return false if the search space has no further configuration."""
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
            # Different values, such as 2*r and a number, may give the same configuration.
            if values is None or self._task.job_config({**self._task.fixed, **values}) not in known:
                return values
            trials.append(Trial(values=values, has_ended=True))

    def _trials(self) -> list[Trial]:
        return [self._trial(job) for job in self._chosen()]

    def _trial(self, job: JobState) -> Trial:
        """Return a job as a trial: its values at exactly equal shares of the steps, and how it ended."""
        selection = self._state.selection
        decision, best = selection.decision_on(job.id), selection.best(job.id)
        reached = map(self._value_of, selection.rungs.reached(job.id))
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
        """Return the value of an evaluation for the search; lower is better."""
        return point.validation_loss if self._task.metric == LOSS else -point.score

    def _job(self, config: JobConfig, values: dict[str, Any]) -> JobState:
        context = self._state.context
        job = Job(id=next_id(self._state.jobs), config=config, values=values)
        return JobState(planned=context.plan(job), context=context)

    def _bounds(self) -> dict[str, tuple[float, float]]:
        """Return the sampled ranges of the search space, by key."""
        axes = (axis for group in self._task.search_space.groups for axis in group)
        return {axis.key: (axis.values.min, axis.values.max) for axis in axes if isinstance(axis.values, Sampled)}
