"""The state changes of a task's jobs. Each one is recorded in the journal."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from alto.errors import DeviceMemoryError
from alto.executor.context import JobState
from alto.executor.micro_batches import JobFailedError
from alto.executor.recorder import JournalRecorder
from alto.executor.slot_manager import TrainingState
from alto.executor.tally import Evaluated
from alto.records import ExitDecision, ExitReason, Throughput
from alto.runs import RunDir
from alto.runs.events import GpusOffered, JobReopened
from alto.scheduler import JobDemand, LastJob, ResidentLimits, forecast_last_jobs, plan_residents
from alto.spec import LOSS, loss_scale, places_at


class JobLifecycle:
    """Admits, parks, ends, reopens, adds and saves jobs.

    Args:
        run_dir: The run directory; its lock is checked before states are saved.
    """

    def __init__(self, state: TrainingState, recorder: JournalRecorder, run_dir: RunDir) -> None:
        self._state = state
        self._recorder = recorder
        self._run_dir = run_dir
        state.slot_manager.on_lost_slot = self._note_lost_slot

    def admit(self, job: JobState, slot: int, reason: str, *, is_data_parallel: bool = False) -> None:
        """Admit a job into a slot.

        Args:
            job: A pending or parked job.
            slot: Slot number, counted over all ranks.
            is_data_parallel: Whether it enters the same local slot on every rank.
        """
        slot_manager = self._state.slot_manager
        slot_manager.admit(job, slot, is_data_parallel=is_data_parallel)
        self._recorder.job_admitted(job, reason, slot_manager.ranks_of(job))

    def park(self, job: JobState, reason: str) -> None:
        """Park a job: free its slot and keep its state."""
        self._recorder.losses(job)
        slot = self._state.slot_manager.save_and_free(job)
        self._recorder.job_parked(job, slot, reason)

    def end(self, job: JobState, decision: ExitDecision | None, command: str | None = None) -> None:
        """End a job.

        Args:
            job: A job that has not ended.
            decision: Reason for an early exit; None after the last step.
            command: Id of the user's command; None if a rule ended the job.
        """
        self._recorder.losses(job)
        # A job that a user has stopped can be resumed while the task runs.
        job.is_resumable = self._keeps_all or (decision is not None and decision.reason is ExitReason.STOPPED)
        slot = self._state.slot_manager.save_and_free(job) if job.slot is not None else None
        best = self._state.selection.best(job.id)
        if decision is None:
            self._recorder.job_completed(job, slot, best)
        else:
            self._recorder.job_exited(job, slot, best, decision, command)

    def exit(self, job: JobState, reason: ExitReason, command: str | None = None, **evidence: float) -> None:
        """End a job at its current step for ``reason``, which does not come from a rule."""
        self._exit(job, reason, evidence, command)

    def _exit(
        self, job: JobState, reason: ExitReason, evidence: Mapping[str, float | str], command: str | None = None
    ) -> None:
        decision = ExitDecision(job=job.id, step=job.step, reason=reason, evidence=evidence)
        self._state.selection.end(decision)
        self.end(job, decision, command)

    def finish(self, job: JobState, test: Evaluated | None) -> None:
        """End a job after its last step in a task without validation.

        Args:
            test: Its loss on the test rows; None if it was not measured.
        """
        self._recorder.losses(job)
        job.is_resumable = self._keeps_all
        slot = self._state.slot_manager.save_and_free(job)
        self._recorder.job_finished(job, slot, test)

    def fail(self, error: JobFailedError) -> None:
        """End the job that cannot continue."""
        self._exit(self._state.in_slot(error.slot), ExitReason.FAILED, error.evidence)

    def reopen(self, job: JobState, command: str) -> None:
        """Resume a job that had ended, for the user's command with id ``command``.

        Raises:
            DeviceMemoryError: Its adapter does not fit; nothing is changed.
        """
        if not job.fits:
            self._fit(job)
            job.fits = True
        self._state.selection.reopen(job.id)
        self._recorder.append(JobReopened(job=job.id, step=job.step, command=command))

    def add_clone(self, clone: JobState, origin: JobState, command: str) -> None:
        """Add a clone as a pending job while the task runs.

        Raises:
            DeviceMemoryError: The clone's adapter does not fit; nothing is changed.
        """
        self._add(clone)
        self._state.selection.add(clone.id, clone.total_steps, loss_scale(clone.config.model_dump()))
        self._recorder.job_added(clone, origin=origin.id, command=command)

    def add_suggestion(self, job: JobState) -> None:
        """Add a job that the search suggests; it is pending. A job whose adapter does not fit into memory ends as
        ``failed``."""
        state = self._state
        try:
            self._add(job)
        except DeviceMemoryError:
            state.jobs[job.id] = job
            job.fits = False
        scale = loss_scale(job.config.model_dump())
        state.selection.add(job.id, job.total_steps, scale, catches_up=True)
        self._recorder.job_added(job)
        if not job.fits:
            self.exit(job, ExitReason.FAILED, adapter_bytes=state.slot_manager.bank.bytes_for(job))
            return
        start_like_others(job, state, self._recorder)

    def add_fork(self, fork: JobState, origin: JobState, replaces: str) -> None:
        """Add a job that continues the training of ``origin`` with its weights and optimizer state; it is parked.

        Args:
            origin: A job that trains, with the same shape.
            replaces: The ended job that the new job replaces.

        Raises:
            DeviceMemoryError: The adapter does not fit; nothing is added.
        """
        fork.forked_at = origin.step
        self._add(fork)
        self._recorder.losses(origin)
        self._state.slot_manager.give_state(fork, origin)
        self._state.selection.fork(fork.id, origin.id)
        self._recorder.job_added(fork, origin=origin.id, replaces=replaces)

    @property
    def _keeps_all(self) -> bool:
        return self._state.context.task.keep == "all"

    def _add(self, job: JobState) -> None:
        self._fit(job)
        self._state.jobs[job.id] = job

    def _fit(self, job: JobState) -> None:
        """Make the bank large enough for ``job`` as well."""
        state = self._state
        state.slot_manager.fit([*(one for one in state.jobs.values() if one.fits), job])

    def _note_lost_slot(self, job: JobState, slot: int) -> None:
        self._recorder.losses(job)
        self._recorder.job_parked(job, slot, "fewer_slots")

    def save(self) -> None:
        """Commit a checkpoint: all states and the journal up to here are durable.

        Raises:
            RunBusyError: The lock is lost (:meth:`alto.runs.RunDir.check_lock`); no rank has written a state.
            RunWriteError: The run directory cannot be written.
        """
        state, ranks = self._state, self._state.context.ranks
        self._run_dir.check_lock()
        ranks.barrier()  # until the first rank has checked that it still holds the lock
        for job in state.jobs.values():
            self._recorder.losses(job)
            state.slot_manager.save(job)
        state.slot_manager.seal(state.jobs.values())
        ranks.barrier()  # until every state is on disk
        self._recorder.checkpoint(state.jobs.values(), state.stopwatch.time_s)
        if ranks.is_first:
            state.slot_manager.remove_predecessors(state.jobs.values())
        ranks.barrier()  # until the journal is on disk too
        state.slot_manager.commit()


def start_like_others(clone: JobState, state: TrainingState, recorder: JournalRecorder) -> None:
    """Give a clone or suggestion that begins with new weights the start value of a job with the same objective
    settings."""
    metric = state.context.task.metric
    for job in state.jobs.values():
        start = state.selection.start_of(job.id)
        if start is not None and job.config.objective == clone.config.objective:
            state.selection.observe_base(clone.id, start)
            metrics = {} if metric == LOSS else {metric: start.score}
            rows = {metric: start.score_rows} if start.score_rows else {}
            rows = {LOSS: start.loss_rows} if start.loss_rows else rows
            known = Evaluated(loss=start.validation_loss, metrics=metrics, rows=rows)
            recorder.base_evaluated([([clone.id], known, None)], state.context)
            return


class JobAdmitter:
    """Admits and parks jobs."""

    def __init__(self, state: TrainingState, lifecycle: JobLifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._planned_for: tuple[int, ResidentLimits] | None = None

    def admit_jobs(self, share: int | None = None, taken: Collection[int] = ()) -> bool:
        """Make a plan, then admit and park jobs accordingly. Do nothing if the plan cannot have changed.

        Args:
            share: Maximum number of slots of the task; None sets no limit.
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
        certain = selection.rungs.certain_to_be_kept() if scoring is None or not scoring.rungs else frozenset()
        for job in self._state.competing():
            yield JobDemand(
                job=job.id,
                batch_size=job.config.rows_per_step,
                num_tokens=job.step_tokens,
                slot=job.slot,
                is_data_parallel=job.is_data_parallel,
                is_waiting=selection.rungs.is_waiting(job.id),
                may_run_ahead=job.id in certain,
                has_started=job.step > 0,
            )


class GpuOffers:
    """Offers to continue with fewer GPUs.

    It reports, once for each number of remaining jobs, how long they would take with one GPU each. The queue may then
    stop this executor and resume the task with that number of GPUs.

    Args:
        throughput: Measured duration of steps on the ranks of this executor; without it (None), nothing is offered.
    """

    def __init__(self, state: TrainingState, recorder: JournalRecorder, throughput: Throughput | None) -> None:
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
            self._recorder.append(
                GpusOffered(
                    num_gpus=forecast.num_gpus,
                    duration_s=forecast.duration_s,
                    data_parallel_duration_s=forecast.spread_duration_s,
                )
            )
