"""A queue on disk while a controller works on it; this process and others submit and cancel tasks.

``queue.yaml`` is the source of truth: a task is submitted or cancelled once that file is written. If a controller dies
after that, the restarted controller completes the journal and answers open commands; each command takes effect once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from alto.cluster.base import TaskTicket
from alto.cluster.controller import Controller, interruption
from alto.errors import AltoError, QueueCommandError, RunBusyError, RunWriteError, UntrustedCodeError
from alto.records import Node, TaskEstimate
from alto.runs import (
    CommandAnswer,
    Journal,
    QueueAction,
    QueueCommand,
    QueueContent,
    QueueDir,
    QueueEntry,
    QueueMailbox,
)
from alto.runs import events as journaled
from alto.spec import Task, build_task


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueIntake:
    """Functions and settings that turn a task into a run of a queue.

    Attributes:
        host: See :class:`alto.cluster.TaskTicket`.
        is_parallel: See :class:`alto.cluster.TaskTicket`.
        check: Raises an error if a task can never be placed on the given nodes.
        base_of: Returns the key of a task's base model; see :class:`alto.cluster.TaskTicket`.
        trusted: Tasks of the queue that may run the Python code of their base models.
        trust_remote_code: Whether tasks that other processes submit may do so too.
    """

    host: str
    is_parallel: bool
    check: Callable[[Task, Sequence[Node]], None]
    estimate: Callable[[Task], TaskEstimate]
    base_of: Callable[[Task], str]
    trusted: Collection[str] = ()
    trust_remote_code: bool = False


class LiveQueue:
    """Runs the tasks of ``queue_dir`` with a controller, and waits for additional tasks until :meth:`finish`.

    Args:
        queue_dir: Locked by this process.
    """

    _controller: Controller

    def __init__(self, queue_dir: QueueDir, journal: Journal, intake: QueueIntake) -> None:
        self._queue_dir = queue_dir
        self._journal = journal
        self._intake = intake
        self._keeps_open = True
        self._takes_tasks = True
        self._has_completed = False
        self._mailbox = QueueMailbox(queue_dir.run)

    def begin(self, controller: Controller, done: Iterable[str]) -> None:
        """Submit the folder's tasks that are not ``done`` or cancelled to a controller that was not started yet."""
        self._controller = controller
        controller.on_turn(self._carry_out_commands)
        finished = set(done)
        self._record_pending_cancels(finished)
        entries, _ = self._queue_dir.read()
        self._journal_missing_events(entries)
        self._controller.begin(
            [self._ticket(entry) for entry in entries if entry.task not in finished and not entry.is_cancelled]
        )

    def submit(self, task: Task, *, tenant: str, priority: int) -> str:
        """Submit a task, whose paths are absolute; durable when this returns. Errors as in `TaskQueue.submit`."""
        task, estimate = task.replace(tenant=tenant, priority=priority), self._intake.estimate(task)
        return self._controller.call(
            lambda: self._submit(task, estimate, self._queue_dir.read(), trust_remote_code=task.needs_trust)
        )

    def cancel(self, task: str) -> None:
        """Cancel a task; see `Controller.cancel`."""
        self._controller.call(lambda: self._cancel(task))

    def finish(self) -> None:
        """Accept no more tasks, and stop the queue once all tasks have ended."""
        self._keeps_open = False

    def wait(self) -> None:
        """Wait until the queue has completed: every task has ended, and it accepts no others.

        Raises:
            TaskInterruptedError: The queue was drained; all running tasks have saved and stopped.
            RunWriteError, RunBusyError, ClusterLostError: The controller ended with this error.
        """
        while True:
            self._controller.wait()
            try:
                if self._controller.call(self._complete):
                    return
            except QueueCommandError:  # the controller has ended
                raise interruption(self._controller.status()) from None
            self._controller.pause()

    # -- on the thread of the controller ---------------------------------------------------------------------------

    def _complete(self) -> bool:
        if not self._has_completed:
            self._carry_out_commands()
            if self._keeps_open or self._controller.status().open_tasks:
                return False
            self._journal.append(journaled.QueueCompleted())
            self._journal.sync()
            self._has_completed = True
        return True

    def _carry_out_commands(self) -> None:
        for command in self._mailbox.pending():
            try:
                answer = CommandAnswer(done=True, message=self._carry_out(command))
            except RunBusyError:  # the queue has failed; it will answer the command when it is resumed
                raise
            except AltoError as error:
                if isinstance(error, RunWriteError) and self._has_effect(command):
                    # The effect is on disk but not in the journal: stop, so that resuming the queue repairs it.
                    raise
                answer = CommandAnswer(done=False, message=str(error))
            self._mailbox.answer(command.id, answer)

    def _has_effect(self, command: QueueCommand) -> bool:
        """Return whether the queue's folder shows the effect of a command."""
        entries, _ = self._queue_dir.read()
        return any(
            entry.command == command.id or (entry.is_cancelled and entry.task == command.task) for entry in entries
        )

    def _carry_out(self, command: QueueCommand) -> str:
        match command.action:
            case QueueAction.SUBMIT:
                return f"{self._submit_once(command)} was submitted."
            case QueueAction.CANCEL:
                return self._cancel_once(command)
            case QueueAction.FINISH:
                self._takes_tasks = False
                self.finish()
                return "The queue takes no further tasks, and ends when all have ended."
            case QueueAction.DRAIN if self._has_completed:
                return "The queue has completed."
            case QueueAction.DRAIN:
                self._controller.begin_drain()
                return "Running tasks save and end."

    def _submit_once(self, command: QueueCommand) -> str:
        content = self._queue_dir.read()
        before = next((entry.task for entry in content[0] if entry.command == command.id), None)
        if before is not None:  # already submitted, but the answer was lost
            return before
        task, estimate = self._read(command)
        if task.needs_trust and not self._intake.trust_remote_code:
            what, which = "trust_remote_code", f"without code of its base model {task.model!r}"
            if not task.trust_remote_code:
                what, which = "select_by", "whose scorer runs no code and reaches no server"
            raise UntrustedCodeError(
                f"{what}: expected a task {which}, or a queue that "
                "allows it, found neither; start the queue with: alto run --wait-for-tasks --trust-remote-code"
            )
        return self._submit(
            task, estimate, content, command=command.id, trust_remote_code=self._intake.trust_remote_code
        )

    def _read(self, command: QueueCommand) -> tuple[Task, TaskEstimate]:
        """Return the task that a command submits, and its estimate.

        Raises:
            AltoError: The task, or a file that it names, has an error.
        """
        try:
            task = build_task(command.values)
            return task, self._intake.estimate(task)
        except AltoError:
            raise
        except Exception as error:  # such as a broken link or a folder without permission; other tasks must go on
            raise QueueCommandError(
                f"expected a task whose model and data can be read by the process that works on the queue, found "
                f"{type(error).__name__}: {error}; correct it, then submit it again"
            ) from error

    def _submit(
        self, task: Task, estimate: TaskEstimate, content: QueueContent, *, command: str = "", trust_remote_code: bool
    ) -> str:
        """Submit a task to the queue, whose file has ``content``."""
        if self._has_completed:
            raise QueueCommandError("this queue has completed and no longer accepts tasks; start a new queue")
        if not self._takes_tasks:
            raise QueueCommandError(
                "this queue no longer accepts tasks: it was asked to stop after its last task "
                "(alto drain --when-done); start a new queue"
            )
        self._intake.check(task, self._controller.status().declared_nodes)
        name = unique_name(task.name, {entry.task for entry in content[0]})
        entry = QueueEntry.new(name, task, estimate, command=command, base=self._intake.base_of(task))
        ticket = self._ticket(entry, trust_remote_code=trust_remote_code)
        self._controller.check(ticket)
        self._queue_dir.add(entry, task, to=content)
        return self._controller.submit(ticket, command=command)

    def _cancel_once(self, command: QueueCommand) -> str:
        entries, _ = self._queue_dir.read()
        if not any(entry.task == command.task and entry.is_cancelled for entry in entries):
            self._cancel(command.task, command.id)
        return f"{command.task} is cancelled; if it runs, it saves and ends."

    def _cancel(self, task: str, command: str = "") -> None:
        self._controller.check_cancel(task)
        self._queue_dir.cancel(task)
        self._controller.cancel(task, command=command)

    def _ticket(self, entry: QueueEntry, *, trust_remote_code: bool = False) -> TaskTicket:
        return TaskTicket.of(
            entry,
            run_dir=str(self._queue_dir.run_of(entry.task).root),
            host=self._intake.host,
            is_parallel=self._intake.is_parallel,
            sharing=entry.sharing,
            base=entry.base,
            trust_remote_code=trust_remote_code or entry.task in self._intake.trusted,
        )

    def _record_pending_cancels(self, finished: Collection[str]) -> None:
        """Record cancellations that were sent while no process worked on the queue, so that these tasks are not started
        and cannot block the others if they cannot run any more. The first turn answers the commands."""
        to_cancel = {command.task for command in self._mailbox.pending() if command.action is QueueAction.CANCEL}
        for entry in self._queue_dir.read()[0] if to_cancel else ():
            if entry.task in to_cancel and entry.task not in finished and not entry.is_cancelled:
                self._queue_dir.cancel(entry.task)

    def _journal_missing_events(self, entries: Sequence[QueueEntry]) -> None:
        """Journal entries that only ``queue.yaml`` has because a controller died between the two writes."""
        submitted, cancelled = set[str](), set[str]()
        for event in (entry.event for entry in self._journal.past):
            if isinstance(event, journaled.QueueStarted):
                submitted.update(task.task for task in event.tasks)
            elif isinstance(event, journaled.TaskSubmitted):
                submitted.add(event.task)
            elif isinstance(event, journaled.TaskCancelled):
                cancelled.add(event.task)
        is_new = not self._journal.past  # then its first event, already written, has all tasks
        for entry in entries:
            if entry.task not in submitted and not is_new:
                self._journal.append(journaled.TaskSubmitted.of(entry, command=entry.command))
            if entry.is_cancelled and entry.task not in cancelled:
                self._journal.append(journaled.TaskCancelled(task=entry.task))


def unique_name(name: str, taken: Collection[str]) -> str:
    """Return ``name``, with a number added if it is taken."""
    numbered = (f"{name}-{number}" for number in itertools.count(2))
    return name if name not in taken else next(found for found in numbered if found not in taken)


def past_ends(queue_dir: QueueDir) -> list[str]:
    """Return the ids of pending commands that end the queue. Call this function before taking the queue's lock: such
    commands were sent to an earlier process."""
    pending = QueueMailbox(queue_dir.run).pending()
    return [command.id for command in pending if command.action in (QueueAction.FINISH, QueueAction.DRAIN)]


def answer_past_ends(queue_dir: QueueDir, commands: Collection[str]) -> None:
    """Answer those of ``commands``, from :func:`past_ends`, that are still pending; needs the lock of ``queue_dir``."""
    mailbox = QueueMailbox(queue_dir.run)
    for command in mailbox.pending():
        if command.id in commands:
            mailbox.answer(command.id, CommandAnswer(done=True, message="The queue had ended already."))
