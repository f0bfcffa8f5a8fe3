"""Carries out the intra-task scheduler's plan of resident jobs, and offers GPUs that the last jobs do not need."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from alto.executor.lifecycle import JobLifecycle
from alto.executor.recorder import JournalRecorder
from alto.executor.task_state import TaskState
from alto.records import Throughput
from alto.scheduler import JobDemand, LastJob, ResidentLimits, forecast_last_jobs, plan_residents
from alto.spec.rungs import places_at

__all__ = ["Admission", "GpuOffers"]


class Admission:
    """Admits and parks jobs."""

    def __init__(self, state: TaskState, lifecycle: JobLifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._planned_for: tuple[int, ResidentLimits] | None = None

    def admit_jobs(self, share: int | None = None, taken: Collection[int] = ()) -> bool:
        """Admit and park jobs as the scheduler plans, where its plan may have changed.

        Args:
            share: Most slots that the task may have; None sets no limit.
            taken: Slots held by jobs of other tasks.

        Returns:
            Whether a plan was made.
        """
        state, ranks = self._state, self._state.context.ranks
        limits = ResidentLimits(
            num_slots=state.slot_manager.num_slots,
            share=share,
            taken=frozenset(taken),
            max_tokens=state.context.task.max_tokens_per_step,
            num_ranks=ranks.size,
        )
        if self._planned_for == (state.selection.num_changes, limits):
            return False
        plan = plan_residents(self._demands(), limits)
        for parking in plan.park:
            self._lifecycle.park(state.jobs[parking.job], parking.reason)
        if plan.park:
            ranks.barrier()  # a rank may read the state that another rank has just saved
        for admission in plan.admit:
            self._lifecycle.admit(
                state.jobs[admission.job],
                admission.slot,
                admission.reason,
                is_data_parallel=admission.is_data_parallel,
            )
        state.ahead = plan.ahead
        self._planned_for = (state.selection.num_changes, limits)
        return True

    def _demands(self) -> Iterator[JobDemand]:
        """Yield what each job that has not ended needs of the bank."""
        selection = self._state.selection
        scoring = self._state.context.task.scoring
        # Scored rungs need the adapter as it is at the rung, and a job that runs ahead no longer has it.
        certain = selection.certain_to_be_kept() if scoring is None or not scoring.rungs else frozenset()
        for job in self._state.competing():
            yield JobDemand(
                job=job.id,
                batch_size=job.config.rows_per_step,
                num_tokens=job.step_tokens,
                slot=job.slot,
                is_data_parallel=job.is_data_parallel,
                is_waiting=selection.is_waiting(job.id),
                may_run_ahead=job.id in certain,
                has_started=job.step > 0,
            )


class GpuOffers:
    """Offers to continue with fewer GPUs.

    It reports, once for each number of remaining jobs, how long they would take with one GPU each. The queue may then
    stop this executor and resume the task with that number of GPUs.

    Args:
        state: State of the task.
        recorder: Writes offers into the journal.
        throughput: Measured duration of steps on the ranks of this executor; without it (None), nothing is offered.
    """

    def __init__(self, state: TaskState, recorder: JournalRecorder, throughput: Throughput | None) -> None:
        self._state = state
        self._recorder = recorder
        self._throughput = throughput
        self._num_offered: int | None = None

    def offer(self) -> None:
        """Record an offer if there is a new one."""
        context, training = self._state.context, self._state.active()
        if (
            self._throughput is None
            or len(training) != len(self._state.selection.training)
            or len(training) == self._num_offered
        ):
            return
        jobs = [
            LastJob(num_tokens=job.step_tokens, num_steps=job.total_steps - job.step, step=job.step) for job in training
        ]
        rungs = context.policy.rungs
        places = [(rung.progress, places_at(rungs, index, len(self._state.jobs))) for index, rung in enumerate(rungs)]
        forecast = forecast_last_jobs(jobs, self._throughput, context.ranks.size, places=places)
        if forecast is not None:
            self._num_offered = len(training)
            self._recorder.gpus_offered(forecast)
