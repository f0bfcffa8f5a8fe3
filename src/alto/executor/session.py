"""One task in an executor: its jobs, from the beginning of the run or its last checkpoint to the result."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

from alto.backbone import is_out_of_memory
from alto.errors import DeviceMemoryError, TaskInterruptedError
from alto.executor.admission import Admission, GpuOffers
from alto.executor.base_evaluation import evaluate_base
from alto.executor.beginning import RunStart, begin_events, resume_event
from alto.executor.conclusion import Hooks, conclude
from alto.executor.context import TaskContext
from alto.executor.control import Control
from alto.executor.exploration import Exploration
from alto.executor.job_state import JobState
from alto.executor.lifecycle import JobLifecycle
from alto.executor.memory_errors import RowTooLargeError
from alto.executor.micro_batches import MicroBatches
from alto.executor.recorder import JournalRecorder
from alto.executor.rung_scoring import score_rung
from alto.executor.shared_bank import SharedBank
from alto.executor.stages import build_state, check_resumable, max_tokens_per_pass, with_references
from alto.executor.tally import Evaluated
from alto.executor.task_state import TaskState
from alto.runs import Command, Journal, Mailbox, resume_command
from alto.scheduler import ReceivedShare
from alto.spec.metric import score_of

__all__ = ["TaskSession"]

# Saving takes at most this share of the time, for adapters of any size.
MAX_SAVING_SHARE = 0.05

FROM_CHECKPOINT = "from_checkpoint"
"""Journal reason of an admission that the scheduler did not plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlInputs:
    """Inputs of the next turn that only the first rank can read.

    Attributes:
        commands: Commands in the mailbox.
        is_interrupted: Whether the task has to stop.
        is_saving_due: Whether a checkpoint has to be saved.
        is_budget_spent: Whether the task may spend no more.
    """

    commands: Sequence[Command] = ()
    is_interrupted: bool = False
    is_saving_due: bool = False
    is_budget_spent: bool = False


class TaskSession:
    """One task on one device, or on one of several ranks: everything of its training but the steps themselves, which an
    :class:`alto.executor.Executor` does for the jobs of all its sessions. Made by :meth:`build`.

    Args:
        state: Of the task, with its bank.
        recorder: Writes the run's journal.
        lifecycle: Changes the state of jobs.
        control: Carries out user commands.
        start: What the run begins with or is resumed from.
        hooks: Functions that the caller provides.

    Attributes:
        received: Its share of the tokens while other tasks trained in the same executor; None where none did.
    """

    def __init__(
        self,
        state: TaskState,
        recorder: JournalRecorder,
        lifecycle: JobLifecycle,
        control: Control,
        start: RunStart,
        hooks: Hooks,
    ) -> None:
        assert hooks.judge is None or state.context.ranks.is_alone, "finalists are judged by one process"
        self.state = state
        self.received: ReceivedShare | None = None
        self._recorder = recorder
        self._lifecycle = lifecycle
        self._control = control
        self._start = start
        self._hooks = hooks
        self._ranks = state.context.ranks
        self._admission = Admission(state, lifecycle)
        self._exploration = Exploration(state, lifecycle, spent_before_s=start.resume_state.duration_s)
        self._gpu_offers = GpuOffers(state, recorder, start.throughput(self._ranks.size))
        self._save_interval_s = state.context.task.checkpoint_interval_s
        self._next_save_at = time.monotonic() + self._save_interval_s
        self._inputs = ControlInputs()

    @classmethod
    def build(
        cls,
        context: TaskContext,
        journal: Journal,
        start: RunStart,
        hooks: Hooks | None = None,
        bank: SharedBank | None = None,
    ) -> Self:
        """Run the stages before training: reference log-probs, then slots in the bank.

        Args:
            context: The task, its base loaded and its jobs planned.
            journal: Of the run; a silent one on all ranks but the first.
            start: What the run begins with or is resumed from.
            hooks: Functions that the caller provides; None provides none.
            bank: Of the executor; None makes one for this task alone.

        Raises:
            RunChangedError: The run is another one than the task; see :func:`alto.executor.stages.check_resumable`.
            TaskInterruptedError: The run was stopped.
            DeviceMemoryError: There is no memory for the bank, or for the base alone on the longest pair.
            ModelError: The base model gives a reply a log-prob that is not finite.
        """
        hooks = hooks or Hooks()
        ranks, resume_state = context.ranks, start.resume_state
        recorder = JournalRecorder(journal, start.run_dir, ranks)

        def stop_if_asked() -> None:
            if ranks.broadcast(hooks.is_interrupted(), bool):
                raise TaskInterruptedError(
                    "stopped as asked while reference log-probs were precomputed; those computed so far are on disk; "
                    f"continue with: {resume_command(start.run_dir.root)}"
                )

        check_resumable(context, resume_state)
        micro_batches = MicroBatches(
            max_tokens_per_pass(context, resume_state),
            recorder.memory_ran_out,
            can_retry=ranks.is_alone,
            is_padded=context.backbone.is_padded,
        )
        context = with_references(
            context, micro_batches, stop_if_asked, bank.reinject if bank is not None else lambda: None
        )
        state = build_state(
            context,
            resume_state,
            start.run_dir,
            bank,
            max_tokens_per_pass=micro_batches.max_tokens,
            on_memory_event=recorder.memory_ran_out,
        )
        try:
            lifecycle = JobLifecycle(state, recorder, start.run_dir)
            control = Control.build(state, lifecycle, recorder, Mailbox(start.run_dir), resume_state)
            return cls(state, recorder, lifecycle, control, start, hooks)
        except BaseException:
            state.slot_manager.detach()  # others may be in the bank
            raise

    # -- the beginning -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Record that the task begins, or restore its jobs as the last checkpoint recorded them."""
        if self._start.is_resumed:
            self._resume()
        else:
            self._recorder.begin(begin_events(self.state, self._start), self._start.resume_state.refusal)
            evaluate_base(self.state, self._recorder)

    def _resume(self) -> None:
        """Restore every job as the checkpoint recorded it."""
        state, resume_state = self.state, self._start.resume_state
        self._recorder.begin([resume_event(state, self._start)], resume_state.refusal)
        assert resume_state.checkpoint is not None
        for job_id, saved in resume_state.checkpoint.jobs.items():
            job = state.jobs[job_id]
            job.step = job.saved_step = saved.step
            job.saved_best_step = saved.best_step
            # A bank may have fewer slots than there were, or jobs of other tasks in them: such a job stays parked.
            if saved.slot is not None and state.slot_manager.is_free(saved.slot):
                self._lifecycle.admit(job, saved.slot, FROM_CHECKPOINT)

    # -- one turn of the executor ----------------------------------------------------------------------------------

    def prepare(self) -> bool:
        """Apply the commands of users, and decide rungs that all jobs have reached.

        Returns:
            Whether jobs are left to train; where not, :meth:`conclude` is next.

        Raises:
            TaskInterruptedError: The run was stopped, and everything is on disk.
            Exception: As of :meth:`check_jobs`.
        """
        self.check_jobs()
        self._inputs = self._ranks.broadcast(self._control_inputs(), ControlInputs)
        self._control.apply(self._inputs.commands)
        while self.state.selection.rung_ready():
            self._hold_rung()
        if self._inputs.is_budget_spent:
            self._exploration.end_all()
        elif not self.state.selection.training:
            self._exploration.suggest(1)  # all jobs have ended at once
        if not self.state.selection.training:
            return False
        if self._inputs.is_interrupted:
            self._interrupt()
        return True

    def check_jobs(self) -> None:
        """Check that its jobs are as they were, where the bank was made anew.

        Raises:
            Exception: What has kept them from leaving the bank or entering it.
        """
        if (error := self.state.slot_manager.error) is not None:
            raise error

    def admit_jobs(self, share: int | None = None, taken: Collection[int] = ()) -> None:
        """Let the scheduler decide which jobs are resident.

        Args:
            share: Most slots that the task may have; None sets no limit.
            taken: Slots that jobs of other tasks have.
        """
        num_slots = self.state.slot_manager.num_slots
        if not self._inputs.is_budget_spent:
            self._exploration.suggest(num_slots if share is None else min(share, num_slots))
        if self._admission.admit_jobs(share, taken):
            self._gpu_offers.offer()

    def stepped(self, losses: Sequence[tuple[JobState, float, float | None]]) -> None:
        """Note the steps that jobs have taken, with their training losses, and the load-balancing losses of routers of
        those that train with them; then evaluate those that are due."""
        for job, loss, router_loss in losses:
            job.step += 1
            job.unsaved_losses.append(loss)
            if router_loss is not None:
                job.unsaved_router_losses.append(router_loss)
            decision = self.state.selection.observe_losses(job.id, job.step, [loss])
            if decision is not None:
                self._lifecycle.end(job, decision)
        competing = [job for job, *_ in losses if self.state.is_competing(job)]
        if self.state.context.data.has_validation:
            self._evaluate([job for job in competing if job.is_due])
        else:
            self._finish([job for job in competing if job.step == job.total_steps])

    def row_too_large(self, error: RowTooLargeError) -> None:
        """End the job of this task whose row does not fit into memory."""
        self._lifecycle.fail(error)

    def save_if_due(self) -> None:
        """Save a checkpoint at intervals, and where a user waits for an answer."""
        if self._control.has_answers or self._inputs.is_saving_due:
            self.save()

    def conclude(self) -> None:
        """Save everything and choose the winner; the result is in the journal.

        Raises:
            NoResultError: No job was ever evaluated with a finite loss.
            TaskInterruptedError: The run was stopped while finalists answered.
        """
        self._record_share()
        self.save()
        conclude(self.state, self._recorder, self._start.run_dir, self._hooks, self._stop_if_asked)
        self._control.close()

    @property
    def bank(self) -> SharedBank:
        """That its jobs have slots in."""
        return self.state.slot_manager.bank

    def detach(self) -> None:
        """Free its slots; what is not saved is lost."""
        self.state.slot_manager.detach()

    def explained(self, error: Exception) -> Exception:
        """``error`` as the user is to read it."""
        if not is_out_of_memory(error):
            return error
        return DeviceMemoryError(
            f"task {self.state.context.task.name!r}: {error}. With more memory, or a lower max_tokens_per_pass in "
            "its task.yaml, the run continues from its last checkpoint with: "
            f"{resume_command(self._start.run_dir.root)}"
        )

    def _control_inputs(self) -> ControlInputs:
        """The external inputs since the last turn that this process can read.

        Only the first rank holds the lock of the run. No rank begins a turn, in which it may write states, before the
        first has found that it still does.
        """
        if not self._ranks.is_first:
            return ControlInputs()
        self._start.run_dir.check_lock()
        return ControlInputs(
            commands=self._control.pending(),
            is_interrupted=self._hooks.is_interrupted(),
            is_saving_due=time.monotonic() >= self._next_save_at,
            is_budget_spent=self._exploration.is_budget_spent(),
        )

    def _hold_rung(self) -> None:
        state, selection = self.state, self.state.selection
        rung, index = selection.next_rung, selection.rungs_held
        assert rung is not None
        # The selection counts the steps of a job that ran ahead, so the journal records them too.
        for job in state.jobs.values():
            self._recorder.losses(job)
        score_rung(state, self._recorder, self._hooks.judge, self._stop_if_asked)
        result = selection.select()
        self._recorder.rung_held(index, rung, result)
        for decision in result.dropped:
            self._lifecycle.end(state.jobs[decision.job], decision)
        self._exploration.exchange(index, result)

    def _evaluate(self, jobs: Sequence[JobState]) -> None:
        selection, context = self.state.selection, self.state.context
        jobs, found = self._evaluated(jobs)
        decisions = [
            selection.observe(
                job.id,
                job.step,
                value.loss,
                score_of(context.task.metric, value.metrics),
                value.rows_of(context.row_metric),
            )
            for job, value in zip(jobs, found, strict=True)
        ]
        best = [job for job in jobs if (point := selection.best(job.id)) is not None and point.step == job.step]
        for job in best:
            self.state.slot_manager.keep_best(job)
        tested = self._tested(best)
        for job, value, decision in zip(jobs, found, decisions, strict=True):
            self._recorder.losses(job)
            train_ema = selection.history(job.id)[-1].train_ema
            self._recorder.job_evaluated(job, value, train_ema, is_best=job in best, test=tested.get(job.id))
            if not selection.is_training(job.id):
                self._lifecycle.end(job, decision)

    def _finish(self, jobs: Sequence[JobState]) -> None:
        """End jobs that nothing evaluates, after their last step: the adapters that they have are the result."""
        for job in jobs:
            self.state.selection.finish(job.id)
            self.state.slot_manager.keep_best(job)
        tested = self._tested(jobs)
        for job in jobs:
            self._lifecycle.finish(job, tested.get(job.id))

    def _evaluated(self, jobs: Sequence[JobState]) -> tuple[Sequence[JobState], Sequence[Evaluated]]:
        """Evaluate ``jobs``; jobs that cannot be evaluated end."""
        while jobs:
            try:
                return jobs, self.state.trainer.evaluate(jobs)
            except RowTooLargeError as error:
                self._lifecycle.fail(error)
            jobs = [job for job in jobs if self.state.is_competing(job)]
        return (), ()

    def _tested(self, jobs: Sequence[JobState]) -> dict[str, Evaluated]:
        """The losses of ``jobs`` on the test rows, by job; without those that they do not fit into memory of."""
        while jobs and self.state.context.data.test is not None:
            try:
                return dict(zip((job.id for job in jobs), self.state.trainer.evaluate(jobs, "test"), strict=True))
            except RowTooLargeError as error:
                jobs = [job for job in jobs if job.slot != error.slot]
        return {}

    # -- saving and stopping -------------------------------------------------------------------------------------

    def save(self) -> None:
        """Save a checkpoint, then answer the commands whose effect it has."""
        began = time.monotonic()
        self._lifecycle.save()
        self._control.send_answers()
        now = time.monotonic()
        self._next_save_at = now + max(self._save_interval_s, (now - began) / MAX_SAVING_SHARE)

    def _record_share(self) -> None:
        if self.received is not None:
            self._recorder.share_received(self.received)
            self.received = None

    def _stop_if_asked(self) -> None:
        if self._hooks.is_interrupted():
            self._interrupt()

    def _interrupt(self) -> None:
        self._record_share()  # before the checkpoint, from which the run is resumed
        self.save()
        training = self.state.selection.training
        self._recorder.task_interrupted(training)
        raise TaskInterruptedError(
            f"stopped as asked, with {len(training)} of {len(self.state.jobs)} jobs still to train and everything on "
            f"disk; continue with: {resume_command(self._start.run_dir.root)}"
        )
