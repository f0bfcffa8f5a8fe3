"""User commands for a running task: stop, resume or clone a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from alto.errors import AltoError, JobCommandError, RunBusyError, RunWriteError
from alto.executor.exploration import clone_job, describe_changes
from alto.executor.job_state import JobState
from alto.executor.lifecycle import JobLifecycle, start_like_others
from alto.executor.recorder import JournalRecorder
from alto.executor.recovery import ResumeState
from alto.executor.slot_manager import TaskState
from alto.records import ExitDecision, ExitReason
from alto.runs import Action, Answer, Command, Event, Mailbox
from alto.runs.events import CommandRefused, JobAdded, JobExited, JobReopened


class Control:
    """Carries out the commands in a run's mailbox. Built by :meth:`build`.

    Every rank carries out the same commands; only the first rank answers them. A command is answered when its effect is
    committed. Until then it stays in the mailbox, so a task whose process dies in between reads it again when it is
    resumed. The journal records which commands took effect.

    Args:
        state: State of the task.
        lifecycle: Changes the state of jobs.
        recorder: Writes refusals and start values of clones into the journal.
        mailbox: Mailbox of the run.
        answers: Answers by command id, for commands that took effect before the run was resumed.
    """

    def __init__(
        self,
        state: TaskState,
        lifecycle: JobLifecycle,
        recorder: JournalRecorder,
        mailbox: Mailbox,
        answers: dict[str, Answer],
    ) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._recorder = recorder
        self._mailbox = mailbox
        self._answers = answers
        self._unsent: list[str] = []

    @classmethod
    def build(
        cls,
        state: TaskState,
        lifecycle: JobLifecycle,
        recorder: JournalRecorder,
        mailbox: Mailbox,
        resume_state: ResumeState,
    ) -> Self:
        """Build a control with the answers recorded in the journal of an interrupted run.

        Args:
            state, lifecycle, recorder, mailbox: See the constructor.
            resume_state: State that the run is resumed from; an empty one contains no command.
        """
        found = (_answered(entry.event) for entry in resume_state.entries)
        return cls(state, lifecycle, recorder, mailbox, dict(answer for answer in found if answer is not None))

    @property
    def has_answers(self) -> bool:
        """Whether a user is waiting for the next checkpoint."""
        return bool(self._unsent)

    def pending(self) -> list[Command]:
        """Return the commands in the mailbox; only the first rank reads it."""
        return self._mailbox.pending()

    def apply(self, commands: Sequence[Command]) -> None:
        """Carry out the commands from the mailbox."""
        for command in commands:
            if command.id in self._unsent:
                continue
            if command.id not in self._answers:
                self._answers[command.id] = self._try(command)
            self._unsent.append(command.id)

    def send_answers(self) -> None:
        """Answer the commands whose effects are committed."""
        for command in self._unsent if self._is_first else ():
            self._mailbox.answer(command, self._answers[command])
        self._unsent = []

    def close(self) -> None:
        """Refuse the remaining commands, because the task has ended."""
        for command in self.pending() if self._is_first else ():
            answer = Answer(done=False, message="the task has just ended; give the command again")
            self._mailbox.answer(command.id, answer)

    @property
    def _is_first(self) -> bool:
        return self._state.context.ranks.is_first

    def _try(self, command: Command) -> Answer:
        try:
            return Answer(done=True, message=self._carry_out(command))
        except (RunBusyError, RunWriteError):
            raise  # the command is not the cause, and its effect may be missing in the journal
        except AltoError as error:
            self._recorder.command_refused(command.id, command.job, str(error))
            return Answer(done=False, message=str(error))

    def _carry_out(self, command: Command) -> str:
        job = self._state.jobs.get(command.job)
        if job is None:
            raise JobCommandError(f"expected a job of this run, found {command.job!r}; alto show lists them")
        match command.action:
            case Action.STOP:
                return self._stop(job, command)
            case Action.RESUME:
                return self._reopen(job, command)
            case Action.CLONE:
                return self._clone(job, command)

    def _stop(self, job: JobState, command: Command) -> str:
        if not self._state.is_competing(job):
            raise JobCommandError(f"expected a job that trains, found that {job.id} has ended; nothing to stop")
        decision = ExitDecision(job=job.id, step=job.step, reason=ExitReason.STOPPED)
        self._state.selection.end(decision)
        self._lifecycle.end(job, decision, command.id)
        return f"{job.id} is stopped after {job.step} of {job.total_steps} steps; it can be resumed"

    def _reopen(self, job: JobState, command: Command) -> str:
        if self._state.is_competing(job):
            raise JobCommandError(f"expected a job that has ended, found that {job.id} trains; nothing to do")
        if self._state.selection.decision_on(job.id) is None:
            raise JobCommandError(
                f"expected a job that was ended early, found that {job.id} has done all its {job.total_steps} steps; "
                "clone it with a larger num_train_epochs instead"
            )
        if not job.is_resumable:
            raise JobCommandError(
                f"expected a job whose state was kept, found that {job.id} was ended by a rule and its state removed, "
                f"as the task has keep: {self._state.context.task.keep}; clone it, or set keep: all in a new run"
            )
        self._lifecycle.reopen(job, command.id)
        return f"{job.id} resumes after {job.step} of {job.total_steps} steps"

    def _clone(self, origin: JobState, command: Command) -> str:
        state, context = self._state, origin.context
        if context.task.refit is not None:
            raise JobCommandError(
                "expected a run that compares jobs, found a refit, which has no validation to compare clones; "
                f"clone a job of {context.task.refit.run}, and refit that run again"
            )
        job = clone_job(origin.planned.job, command.changes, state.jobs.values(), warm=command.warm, task=context.task)
        clone = JobState(planned=context.plan(job), context=context)
        if command.warm:
            self._check_warm_start(origin, clone)
            state.slot_manager.give_start(clone, origin)
        self._lifecycle.add_clone(clone, origin, command.id)
        if not clone.starts_warm:
            start_like_others(clone, state, self._recorder)
        start = f"the best weights of {origin.id}" if command.warm else "new weights"
        changes = describe_changes(origin.planned.job, job)
        return f"{clone.id} is {origin.id} with {changes}, and begins with {start}"

    def _check_warm_start(self, origin: JobState, clone: JobState) -> None:
        if self._state.selection.best(origin.id) is None:
            raise JobCommandError(
                f"expected a job with a finite validation loss to start from, found that {origin.id} has none yet; "
                "wait for its first evaluation, or let the clone start with new weights"
            )
        if clone.shape != origin.shape:
            raise JobCommandError(
                f"expected the ranks, targets, magnitudes and biases of {origin.id} in a clone that starts from its "
                "weights, found different ones; do not change r, target_modules, use_dora and bias, or let the clone "
                "start with new weights"
            )


def _answered(event: Event) -> tuple[str, Answer] | None:
    """Return the command that caused an event, and its answer; None for events that no command caused."""
    match event:
        case CommandRefused(command=command, why=why):
            return command, Answer(done=False, message=why)
        case JobAdded(command=str(command), job=job) | JobExited(command=str(command), job=job):
            return command, Answer(done=True, message=f"{job}: done before the run was resumed")
        case JobReopened(command=str(command), job=job):
            return command, Answer(done=True, message=f"{job}: done before the run was resumed")
    return None
