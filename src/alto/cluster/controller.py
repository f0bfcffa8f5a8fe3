"""The controller: owns the GPUs of a cluster and everything that runs on them, on its own thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self, TypeVar

from alto.cluster.base import Cluster, TaskTicket
from alto.cluster.dispatcher import ControllerStatus, Dispatcher, Retrying
from alto.errors import QueueCommandError, TaskInterruptedError
from alto.runs import CommandAnswer, JobAction, Journal, JournalEntry, JournalTail, Mailbox, Observer, RunDir
from alto.scheduler import schedule_tasks
from alto.scheduler.queue import Queue, QueueSettings, Solve

POLL_S = 0.25
"""Longest wait for the cluster in one turn. Commands and interruptions are handled between turns."""

T = TypeVar("T")


class Controller:
    """Runs tasks on a cluster; tasks can be added and cancelled at any time.

    :meth:`start` starts a thread that drives the cluster; every other method may be called from any thread. If it was
    not started, each method works on the caller's thread, and methods that wait call :meth:`turn`, so that a test needs
    no thread and no real clock. Use it as a context manager, or :meth:`close` it.

    Args:
        cluster: Used by this controller only, until it is closed; the caller that opened it closes it.
        queue: Made for the cluster's nodes; nothing has been submitted to it yet.
        show: Called with every journal entry of the tasks' runs, wrapped in a `TaskRelayed`; must return at once.
        is_interrupted: Called in every turn; once it returns true, running executors save and stop, which matches
            :meth:`drain`.
        clock: In seconds; never runs backwards.
    """

    def __init__(
        self,
        cluster: Cluster,
        queue: Queue,
        journal: Journal,
        *,
        show: Observer = lambda entry: None,
        is_interrupted: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._journal = journal
        self._is_interrupted = is_interrupted
        self._clock = clock
        self._dispatcher = Dispatcher(cluster, queue, journal, show=show, clock=clock)
        self._hooks: list[Callable[[], None]] = []
        self._calls: deque[_Call] = deque()
        self._changed = threading.Condition()
        self._num_turns = 0
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._has_ended = False
        self._error: BaseException | None = None

    # -- its life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        assert self._thread is None, "it was started"
        self._thread = threading.Thread(target=self._work, name="alto-controller", daemon=True)
        self._thread.start()

    def begin(self, tickets: Sequence[TaskTicket]) -> None:
        """Add tasks that the journal already has, in one plan; must be called before :meth:`start`.

        Raises:
            SpecError: A name is taken, or the cluster can never provide a task's GPUs; then no task is added.
        """
        self._dispatcher.begin(tickets)

    def retry_by(self, rules: Retrying) -> None:
        """Start tasks again by ``rules`` after attempts have ended; must be called before :meth:`start`."""
        self._dispatcher.retrying = rules

    def on_turn(self, hook: Callable[[], None]) -> None:
        """Call ``hook`` in every turn, on the controller's thread; must be called before :meth:`start`."""
        self._hooks.append(hook)

    def drain(self) -> None:
        """Ask running executors to save and stop, start no others, and wait until none runs.

        Raises:
            RunWriteError, RunBusyError, ClusterLostError: The controller had already ended with this error.
        """
        if not self._dispatcher.is_drained:
            with contextlib.suppress(_EndedError):  # another caller has meanwhile drained or closed it
                self.begin_drain()
        while not self._dispatcher.is_drained:
            num_turns = self._num_turns
            self._check_alive()
            self._pause(num_turns)

    @property
    def has_ended(self) -> bool:
        """Whether the controller was closed or drained, or failed."""
        return self._has_ended

    def begin_drain(self) -> None:
        """Ask running executors to save and stop, and start no others. Does not wait."""
        self.call(self._dispatcher.drain)

    def pause(self) -> None:
        """Wait for the next turn, or the end of the controller."""
        self._pause(self._num_turns)

    def close(self) -> None:
        """Kill running executors. Idempotent. Journal and status can still be read."""
        self._is_closing = True
        if self._thread is None:
            self._end(None)
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- tasks and commands ----------------------------------------------------------------------------------------

    def submit(self, ticket: TaskTicket, *, command: str = "") -> str:
        """Add a task to the queue.

        Returns:
            The task's id in this controller: its name.

        Raises:
            SpecError: The name is taken, or the cluster can never provide its GPUs.
            QueueCommandError: The controller no longer starts tasks.
        """
        self.call(lambda: self._dispatcher.submit(ticket, command))
        return ticket.task

    def check(self, ticket: TaskTicket) -> None:
        """Check that :meth:`submit` would accept a task; raises the same errors."""
        self.call(lambda: self._dispatcher.check(ticket))

    def check_cancel(self, task: str) -> None:
        """Check that :meth:`cancel` would accept a task; raises the same errors."""
        self.call(lambda: self._dispatcher.check_cancel(task))

    def cancel(self, task: str, *, command: str = "") -> None:
        """Cancel a task. A waiting task is removed from the queue; a running task's executor is asked to save and stop.
        Does not wait.

        Raises:
            QueueCommandError: The task does not exist or has already finished, or the controller no longer starts
                tasks.
        """
        self.call(lambda: self._dispatcher.cancel(task, command))

    def prioritise(self, priorities: Mapping[str, int]) -> None:
        """Set the priorities of waiting tasks, then plan once; running and finished tasks are not changed.

        Raises:
            SpecError: A task does not exist.
            QueueCommandError: The controller no longer starts tasks.
        """
        self.call(lambda: self._dispatcher.prioritise(priorities))

    def job_command(
        self,
        task: str,
        action: JobAction,
        job: str,
        *,
        changes: Mapping[str, Any] | None = None,
        warm: bool = False,
        timeout_s: float = 60.0,
    ) -> CommandAnswer | None:
        """Stop, resume or clone a job of a task; see :meth:`alto.engine.task_queue.TaskQueue.job_command`."""
        ticket = self.call(lambda: self._dispatcher.ticket_of(task))
        mailbox = Mailbox(RunDir(Path(ticket.run_dir)))
        command = mailbox.send(action, job, changes=changes, warm=warm)
        sleep = time.sleep if self._thread is not None else lambda _: self.turn()
        return mailbox.wait_for_answer(command, timeout_s, sleep=sleep)

    def status(self) -> ControllerStatus:
        """Return the current status of all tasks; after the controller has ended, the last status."""
        try:
            return self.call(self._dispatcher.status)
        except Exception:
            if not self._has_ended:
                raise
            return self._dispatcher.status()

    def check_connected(self) -> None:
        """Raise the error that ended the controller, such as `ClusterLostError`; no-op if it runs."""
        if self._error is not None:
            raise self._error

    def events(self, since: int = 0, *, follow: bool = True) -> Iterator[JournalEntry]:
        """Yield the entries of the journal in order, each once; see :meth:`alto.engine.task_queue.TaskQueue.events`."""
        tail = JournalTail(self._journal.path)
        while True:
            has_ended, num_turns = self._has_ended, self._num_turns  # read first, so that no entry is missed
            yield from (entry for entry in tail.read() if entry.seq >= since)
            if has_ended or not follow:
                return
            self._pause(num_turns)

    def wait(self, *tasks: str, timeout_s: float | None = None) -> bool:
        """Wait until all of ``tasks`` have ended; without names, until every task has ended.

        Args:
            timeout_s: On the controller's clock; None waits forever.

        Returns:
            True once they have ended; False after the timeout.

        Raises:
            TaskInterruptedError: The controller was drained before the named tasks had ended.
            RunWriteError, RunBusyError, ClusterLostError: The controller ended with this error.
        """
        until_s = None if timeout_s is None else self._clock() + timeout_s
        while True:
            num_turns, has_ended = self._num_turns, self._has_ended
            status = self.status()
            if self._dispatcher.is_drained and not (tasks and set(tasks).isdisjoint(status.open_tasks)):
                raise interruption(status)
            if not set(tasks or status.tasks).intersection(status.open_tasks):
                return True
            if has_ended:
                self._check_alive()
            if until_s is not None and self._clock() >= until_s:
                return False
            self._pause(num_turns)

    def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` between two turns, when nothing else changes the state; return its result or raise its error.

        Raises:
            QueueCommandError: The controller has ended.
        """
        if self._thread is threading.current_thread():
            return work()
        with self._changed:
            if self._has_ended:
                raise self._why_ended()
            if self._thread is not None:
                call = _Call(work)
                self._calls.append(call)
        return call.future.result() if self._thread is not None else work()

    # -- its thread ------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Carry out commands and handle the cluster's events."""
        while self._calls:
            self._calls.popleft().do()
        for hook in self._hooks:
            hook()
        if self._is_interrupted():
            self._dispatcher.drain()
        self._dispatcher.turn(POLL_S)
        with self._changed:
            self._num_turns += 1
            self._changed.notify_all()

    def _work(self) -> None:
        error: BaseException | None = None
        try:
            while not (self._is_closing or self._dispatcher.is_drained):
                self.turn()
        except BaseException as found:  # raised again in the threads that wait for tasks
            error = found
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        try:
            if not self._has_ended and self._dispatcher.is_running:
                self._cluster.close()
        except Exception as found:
            error = error or found
        with self._changed:
            self._error = self._error or error
            self._has_ended = True
            calls, self._calls = list(self._calls), deque()
            self._changed.notify_all()
        for call in calls:
            call.future.set_exception(self._why_ended())

    def _pause(self, num_turns: int) -> None:
        """Wait until the number of turns is no longer ``num_turns``, or the controller has ended."""
        if self._thread is None:
            self.turn()
            return
        with self._changed:
            self._changed.wait_for(lambda: self._num_turns != num_turns or self._has_ended)

    def _check_alive(self) -> None:
        if self._has_ended and not self._dispatcher.is_drained:
            raise self._why_ended()

    def _why_ended(self) -> BaseException:
        return self._error or _EndedError("expected a controller that runs, found one that was closed")


@contextlib.contextmanager
def running_controller(
    cluster: Cluster,
    journal: Journal,
    settings: QueueSettings,
    solve: Solve = lambda problem, _: schedule_tasks(problem, method="fifo"),
    *,
    begin: Callable[[Controller], object] = lambda controller: None,
    show: Observer = lambda entry: None,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> Iterator[Controller]:
    """Yield a controller on its thread, with a new queue; leaving the ``with`` block kills executors that still run.

    Args:
        settings, solve: Settings and solver of the queue; by default tasks start in the order of submission.
        begin: Called with the controller before its thread starts.
        cluster, journal, show, is_interrupted: See :class:`Controller`.
    """
    queue = Queue(tuple(cluster.nodes), settings, solve)
    with Controller(cluster, queue, journal, show=show, is_interrupted=is_interrupted) as controller:
        begin(controller)
        controller.start()
        yield controller


def interruption(status: ControllerStatus) -> TaskInterruptedError:
    """Return the error for callers that wait for tasks of a controller that was drained before the tasks ended."""
    return TaskInterruptedError(
        f"stopped on request, with {len(status.open_tasks)} of {len(status.tasks)} tasks still to finish and "
        "everything on disk"
    )


class _EndedError(QueueCommandError):
    """Raised when the controller has ended without an error."""


class _Call:
    """A call to be made on the controller's thread."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self._work = work

    def do(self) -> None:
        try:
            self.future.set_result(self._work())
        except BaseException as error:
            self.future.set_exception(error)
