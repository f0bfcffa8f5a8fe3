"""What others ask of a running task: stop a job, go on with one, clone one."""

from __future__ import annotations

from collections.abc import Sequence

from alto.errors import AltoError, JobCommandError, RunBusyError, RunWriteError
from alto.executor.clone import clone_job, describe_changes
from alto.executor.job_run import JobRun
from alto.executor.recovery import ResumeState
from alto.executor.task_run import TaskRun
from alto.records import ExitDecision, ExitReason
from alto.runs import Action, Answer, Command, Event, Mailbox

__all__ = ["Control"]


class Control:
    """Carries out the commands in a run's mailbox.

    Every rank carries out the same ones, and one alone (``writes``) answers them. A command is answered when what it
    did is committed; until then it stays in the mailbox, so a task that dies in between finds it again. The journal
    remembers which commands took effect.
    """

    def __init__(self, state: TaskRun, mailbox: Mailbox, resume_state: ResumeState, *, writes: bool = True) -> None:
        self._state = state
        self._writes = writes
        self._mailbox = mailbox
        self._answers = {event["command"]: _answer_of(event) for event in resume_state.events if "command" in event}
        self._unsent: list[str] = []

    @property
    def has_answers(self) -> bool:
        """Whether somebody waits for the next checkpoint."""
        return bool(self._unsent)

    def pending(self) -> list[Command]:
        """What the mailbox asks; of several ranks the first alone looks."""
        return self._mailbox.pending()

    def apply(self, commands: Sequence[Command]) -> None:
        """Do what was found in the mailbox."""
        for command in commands:
            if command.id in self._unsent:
                continue
            if command.id not in self._answers:
                self._answers[command.id] = self._try(command)
            self._unsent.append(command.id)

    def send_answers(self) -> None:
        """Answer the commands whose effect is committed."""
        for command in self._unsent if self._writes else ():
            self._mailbox.answer(command, self._answers[command])
        self._unsent = []

    def close(self) -> None:
        """The task has ended: whatever is still asked for comes too late."""
        for command in self.pending() if self._writes else ():
            self._mailbox.answer(command.id, Answer(done=False, message="the task has ended; start a new run"))

    def _try(self, command: Command) -> Answer:
        try:
            return Answer(done=True, message=self._carry_out(command))
        except (RunBusyError, RunWriteError):
            raise  # not the command's fault, and what it did may not be in the journal
        except AltoError as error:
            self._state.journal.append("command_refused", command=command.id, job=command.job, why=str(error))
            return Answer(done=False, message=str(error))

    def _carry_out(self, command: Command) -> str:
        run = self._state.runs.get(command.job)
        if run is None:
            raise JobCommandError(f"expected a job of this run, found {command.job!r}; alto show lists them")
        match command.action:
            case Action.STOP:
                return self._stop(run, command)
            case Action.RESUME:
                return self._reopen(run, command)
            case Action.CLONE:
                return self._clone(run, command)

    def _stop(self, run: JobRun, command: Command) -> str:
        if not self._state.is_competing(run):
            raise JobCommandError(f"expected a job that trains, found that {run.id} has ended; nothing to stop")
        decision = ExitDecision(job=run.id, step=run.step, reason=ExitReason.STOPPED)
        self._state.selection.end(decision)
        self._state.end(run, decision, command.id)
        return f"{run.id} is stopped after {run.step} of {run.total_steps} steps; alto job resume goes on with it"

    def _reopen(self, run: JobRun, command: Command) -> str:
        if self._state.is_competing(run):
            raise JobCommandError(f"expected a job that has ended, found that {run.id} trains; nothing to do")
        if self._state.selection.decision_on(run.id) is None:
            raise JobCommandError(
                f"expected a job that was ended early, found that {run.id} has done all its {run.total_steps} steps; "
                "clone it with a larger num_train_epochs instead"
            )
        self._state.reopen(run, command.id)
        return f"{run.id} goes on after {run.step} of {run.total_steps} steps"

    def _clone(self, origin: JobRun, command: Command) -> str:
        others, method = self._state.runs.values(), self._state.task.method
        job = clone_job(origin.job, command.changes, others, warm=command.warm, method=method)
        clone = self._state.plan_clone(job)
        if command.warm:
            self._check_warm_start(origin, clone)
            self._state.slot_manager.give_start(clone, origin)
        self._state.add(clone, origin, command.id)
        start = f"the best weights of {origin.id}" if command.warm else "new weights"
        return f"{clone.id} is {origin.id} with {describe_changes(origin.job, job)}, and begins with {start}"

    def _check_warm_start(self, origin: JobRun, clone: JobRun) -> None:
        if self._state.selection.best(origin.id) is None:
            raise JobCommandError(
                f"expected a job with a finite validation loss to start from, found none of {origin.id} yet; "
                "wait for its first evaluation, or clone it without --warm"
            )
        if clone.shape != origin.shape:
            raise JobCommandError(
                f"expected the rank and targets of {origin.id} in a clone that starts from its weights, found others; "
                "leave r and target_modules as they are, or clone it without --warm"
            )


def _answer_of(event: Event) -> Answer:
    if event["event"] == "command_refused":
        return Answer(done=False, message=event["why"])
    return Answer(done=True, message=f"{event['job']}: done before the run was resumed")
