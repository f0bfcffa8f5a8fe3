"""Carries out a queue's actions on a cluster, reports the cluster's events to the queue, and journals both. Has no
thread of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from alto.base import is_number
from alto.cluster.base import (
    AttemptEnded,
    Cluster,
    ClusterEvent,
    EntryWritten,
    GpuAdded,
    GpuLost,
    Launch,
    Outcome,
    TaskTicket,
)
from alto.errors import QueueCommandError
from alto.records import MAX_DURATION_S, Demand, Gpu, Node
from alto.runs import NOT_FOLDABLE, Journal, JournalEntry, Observer, RunDir, RunHistory, has_result, history_before
from alto.runs import events as journaled
from alto.runs.events import NO_SEQ, TaskRelayed
from alto.runs.progress import fraction_done, remaining_duration_s
from alto.scheduler import queue as planning
from alto.scheduler.queue import (
    Action,
    Cancelled,
    Failed,
    Finished,
    GaveUp,
    Offered,
    Planned,
    Prioritised,
    Progressed,
    Queue,
    QueueInput,
    ScheduledTask,
    Started,
    StartTask,
    StopTask,
    Submitted,
    TaskState,
    Woken,
)


@dataclass(slots=True, kw_only=True)
class RunningAttempt:
    """A running attempt and its measured speed.

    Attributes:
        progress_before: Progress of the run on disk when the attempt was started.
        start_s: Seconds from the launch until it began to train.
        began_at: Time when it began to train; None before.
    """

    launch: Launch
    expected_s: float
    launched_at: float
    progress_before: tuple[float, ...] = ()
    start_s: float = 0.0
    history: RunHistory = field(default_factory=RunHistory)
    began_at: float | None = None
    fraction_before: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStatus(Demand):
    """The current status of one task; ``duration_s`` is the estimate for the task, or for its next attempt.

    Attributes:
        gpus: Its GPUs while it runs; otherwise empty.
        attempt: Number of attempts so far.
        fraction_done: Fraction of its expected training samples that it has trained, in [0, 1], as last reported.
        num_failures: Number of attempts in a row that ended with a failure that counts.
        ended: End of its latest attempt; None if none has ended.
        waits_for: The GPUs missing before it can be planned; empty if none are missing.
    """

    state: TaskState
    gpus: tuple[Gpu, ...]
    attempt: int
    fraction_done: float
    num_failures: int
    reason: str
    ended: AttemptEnded | None
    waits_for: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether the task is finished, failed or stopped for good."""
        return self.state in (TaskState.FINISHED, TaskState.FAILED, TaskState.STOPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerStatus:
    """The current status of a controller.

    Attributes:
        tasks: All submitted tasks by name, in order of submission.
        declared_nodes: The largest machines that the cluster has had; a task that does not fit on them is refused.
    """

    nodes: tuple[Node, ...]
    tasks: Mapping[str, TaskStatus]
    declared_nodes: tuple[Node, ...] = ()

    @property
    def open_tasks(self) -> tuple[str, ...]:
        """Names of the tasks that have not ended."""
        return tuple(name for name, task in self.tasks.items() if not task.has_ended)


_PROGRESS_EVENTS = (
    journaled.JobEvaluated,
    journaled.WarmupEnded,
    journaled.JobExited,
    journaled.JobCompleted,
)
"""Events that report a run's progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrying:
    """Rules for starting a task again after an attempt has ended.

    Attributes:
        interrupted: Whether a task is started again after an attempt that ended as ``interrupted`` without a request of
            this controller.
        progress_of: Returns the progress of a run on disk as numbers that only grow. A lost attempt that has increased
            one of them resets the count of failures in a row. With None, no attempt resets it.
    """

    interrupted: bool = True
    progress_of: Callable[[RunDir], tuple[float, ...]] | None = None

    def progress(self, ticket: TaskTicket) -> tuple[float, ...]:
        """Return the progress of a task's run; empty if it is not asked for."""
        return () if self.progress_of is None else self.progress_of(RunDir(Path(ticket.run_dir)))


class Dispatcher:
    """Handles the tasks of one controller from submission to end. Used by one thread at a time.

    Commands raise the errors of the controller's methods.

    Args:
        cluster, queue, journal, show, clock: See :class:`alto.cluster.Controller`.

    Attributes:
        retrying: Rules for starting a task again after an attempt has ended.
    """

    def __init__(
        self,
        cluster: Cluster,
        queue: Queue,
        journal: Journal,
        *,
        show: Observer,
        clock: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._queue = queue
        self._journal = journal
        self._show = show
        self.retrying = Retrying()
        self._clock = clock
        self._began_at = clock()
        self._tickets: dict[str, TaskTicket] = {}
        self._running: dict[str, RunningAttempt] = {}
        self._ended: dict[str, AttemptEnded] = {}
        self._is_draining = False
        self._is_drained = False
        self._broken_by: Exception | None = None

    # -- commands --------------------------------------------------------------------------------------------------

    def begin(self, tickets: Sequence[TaskTicket]) -> None:
        """Add tasks that the journal already has, in one plan."""
        self._take_in(tickets, lambda: None)

    def submit(self, ticket: TaskTicket, command: str = "") -> None:
        """Add a new task and journal it; ``command`` is the id of the command that submits it."""
        self.check(ticket)
        self._take_in([ticket], lambda: self._journal.append(journaled.TaskSubmitted.of(ticket, command=command)))

    def check(self, ticket: TaskTicket) -> None:
        """Check that a task can be submitted."""
        self._check_not_draining()
        now_s = self._now_s()
        self._queue.check(Submitted(time_s=now_s, demand=ticket.demand(now_s)))

    def ticket_of(self, task: str) -> TaskTicket:
        """Return the ticket of a task that has not ended."""
        self._check_known(task)
        return self._tickets[task]

    def cancel(self, task: str, command: str = "") -> TaskState:
        """Cancel a task: remove it from the queue, or let its executor save and end; return its new state."""
        self.check_cancel(task)
        found = self._queue.tasks[task]
        if found.state is not TaskState.STOPPING:
            actions = self._queue.apply(Cancelled(time_s=self._now_s(), task=task))
            with self._breaking():
                self._journal.append(journaled.TaskCancelled(task=task, command=command))
                self._do_all(actions)
        return found.state

    def prioritise(self, priorities: Mapping[str, int]) -> None:
        """Change the priorities of waiting tasks; other tasks stay the same."""
        self._check_not_draining()
        now_s = self._now_s()
        events = [Prioritised(time_s=now_s, task=task, priority=found) for task, found in priorities.items()]
        actions = self._queue.apply(*events)
        with self._breaking():
            self._do_all(actions)

    def check_cancel(self, task: str) -> None:
        """Check that a task can be cancelled."""
        self._check_not_draining()
        self._check_known(task)

    def drain(self) -> None:
        """Let every executor save and end, and start no other."""
        if not self._is_draining:
            self._is_draining = True
            for task in self._running:
                self._cluster.stop(task)

    @property
    def is_running(self) -> bool:
        """Whether any executor runs."""
        return bool(self._running)

    @property
    def is_drained(self) -> bool:
        """Whether all executors have saved and ended after a drain, and the journal records it."""
        return self._is_drained

    def status(self) -> ControllerStatus:
        """Return the current status."""
        return ControllerStatus(
            nodes=tuple(self._cluster.nodes),
            tasks=MappingProxyType({name: self._status_of(task) for name, task in self._queue.tasks.items()}),
            declared_nodes=self._queue.declared_nodes,
        )

    def turn(self, most_s: float) -> None:
        """Handle the cluster's events; wait up to ``most_s`` for one.

        Raises:
            RunWriteError, RunBusyError: The journal cannot be written.
            ClusterLostError: The cluster cannot be reached any more.
        """
        if self._broken_by is not None:
            raise self._broken_by
        wake_s = None if self._is_draining else self._queue.next_wake_s
        wait_s = most_s if wake_s is None else min(most_s, max(0.0, wake_s - self._now_s()))
        # Apply all events at once, so that nothing is started on a GPU whose loss is reported by a later event.
        events = [found for event in self._cluster.poll(wait_s) if (found := self._handle(event)) is not None]
        if self._is_draining:  # not reported to the queue, so that it starts no other executors
            self._end_drain()
            return
        if wake_s is not None and wake_s <= self._now_s():
            events.append(Woken(time_s=self._now_s()))
        if events:
            self._do_all(self._queue.apply(*events))

    # -- from the cluster to the queue -----------------------------------------------------------------------------

    def _handle(self, event: ClusterEvent) -> QueueInput | None:
        """Journal ``event``; return the queue's event for it."""
        match event:
            case EntryWritten():
                return self._handle_entry(event)
            case AttemptEnded():
                return self._handle_end(event)
            case GpuLost(gpu=gpu):
                self._journal.append(journaled.GpuLost(node=gpu.node, index=gpu.index))
                return planning.GpuLost(time_s=self._now_s(), gpu=gpu)
            case GpuAdded(gpu=gpu):
                self._journal.append(journaled.GpuAdded(node=gpu.node, index=gpu.index))
                return planning.GpuAdded(time_s=self._now_s(), gpu=gpu)

    def _handle_entry(self, written: EntryWritten) -> QueueInput | None:
        attempt = self._running.get(written.task)
        if attempt is None or attempt.launch.attempt != written.attempt:
            return None
        if isinstance(written.entry.event, journaled.TaskResumed):
            attempt.history = history_before(attempt.launch.run_dir, written.entry.seq)
        with contextlib.suppress(*NOT_FOLDABLE):  # an invalid entry changes no estimate
            attempt.history.apply(written.entry)
        self._show(
            JournalEntry(seq=NO_SEQ, time=written.entry.time, event=TaskRelayed(task=written.task, entry=written.entry))
        )
        event = written.entry.event
        if isinstance(event, journaled.TaskStarted | journaled.TaskResumed):
            attempt.began_at, attempt.fraction_before = self._clock(), fraction_done(attempt.history)
            attempt.start_s = attempt.began_at - attempt.launched_at
            return Started(time_s=self._now_s(), task=written.task, attempt=written.attempt)
        if isinstance(event, journaled.GpusOffered) and _is_valid(event):
            return Offered(
                time_s=self._now_s(),
                task=written.task,
                attempt=written.attempt,
                num_gpus=event.num_gpus,
                duration_s=attempt.start_s + event.duration_s,
                kept_duration_s=event.data_parallel_duration_s,
            )
        if isinstance(event, _PROGRESS_EVENTS) and attempt.began_at is not None:
            elapsed_s = self._clock() - attempt.began_at
            remaining_s = remaining_duration_s(
                self._expected_s(attempt, elapsed_s),
                elapsed_s=elapsed_s,
                fraction_before=attempt.fraction_before,
                fraction_done=fraction_done(attempt.history),
            )
            return Progressed(time_s=self._now_s(), task=written.task, attempt=written.attempt, remaining_s=remaining_s)
        return None

    def _expected_s(self, attempt: RunningAttempt, elapsed_s: float) -> float:
        """Return the estimated seconds of an attempt's training; in a shared executor, the queue's estimate."""
        task = attempt.launch.task
        executor = attempt.launch.executor
        if not any(
            other.launch.executor == executor for name, other in self._running.items() if executor and name != task
        ):
            return attempt.expected_s
        return elapsed_s + max(0.0, self._queue.tasks[task].expected_end_s - self._now_s())

    def _handle_end(self, ended: AttemptEnded) -> QueueInput | None:
        attempt = self._running.get(ended.task)
        if attempt is None or attempt.launch.attempt != ended.attempt:
            return None
        del self._running[ended.task]
        ticket = self._tickets[ended.task]
        if ended.outcome is not Outcome.FINISHED and has_result(RunDir(Path(ticket.run_dir))):
            # A task that has its result is finished, even if the attempt fails afterwards.
            notice = f"Ended after its result was complete: {ended.reason}"
            ended = replace(ended, outcome=Outcome.FINISHED, reason="", notices=(notice,))
        self._ended[ended.task] = ended
        self._journal.append(
            journaled.AttemptEnded(
                task=ended.task,
                attempt=ended.attempt,
                outcome=ended.outcome.value,
                reason=ended.reason or " ".join(ended.notices),
            )
        )
        if ended.outcome is Outcome.FINISHED:
            return Finished(time_s=self._now_s(), task=ended.task, attempt=ended.attempt)
        return Failed(
            time_s=self._now_s(),
            task=ended.task,
            attempt=ended.attempt,
            reason=ended.reason,
            is_retryable=ended.outcome is Outcome.LOST
            or (ended.outcome is Outcome.INTERRUPTED and self.retrying.interrupted),
            remaining_s=max(attempt.expected_s * (1.0 - fraction_done(attempt.history)), 1.0),
            has_progressed=any(
                new > old for new, old in zip(self.retrying.progress(ticket), attempt.progress_before, strict=True)
            ),
        )

    def _end_drain(self) -> None:
        if self._running or self._is_drained:
            return
        self._journal.append(journaled.QueueInterrupted(open=tuple(sorted(self.status().open_tasks))))
        self._is_drained = True

    # -- from the queue to the cluster -----------------------------------------------------------------------------

    def _take_in(self, tickets: Sequence[TaskTicket], journal: Callable[[], object]) -> None:
        now_s = self._now_s()
        actions = self._queue.apply(*(Submitted(time_s=now_s, demand=ticket.demand(now_s)) for ticket in tickets))
        with self._breaking():
            journal()
            self._tickets.update({ticket.task: ticket for ticket in tickets})
            self._do_all(actions)

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Mark the dispatcher as broken after an error inside, which leaves queue, journal and cluster inconsistent."""
        try:
            yield
        except Exception as error:
            self._broken_by = error
            raise

    def _do_all(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Planned(reason=reason, schedule=schedule):
                self._journal.append(
                    journaled.SchedulePlanned(
                        reason=reason,
                        method=schedule.method,
                        status=schedule.status,
                        makespan_s=schedule.makespan_s,
                        bound_s=schedule.bound_s,
                        notice=schedule.notice,
                        placements=schedule.placements,
                    )
                )
            case StartTask():
                self._start(action)
            case StopTask(task=task):
                self._cluster.stop(task)
            case GaveUp(task=task, reason=reason):
                self._journal.append(journaled.TaskGivenUp(task=task, reason=reason))

    def _start(self, action: StartTask) -> None:
        self._journal.append(
            journaled.AttemptStarted(
                task=action.task, attempt=action.attempt, gpus=tuple(action.gpus), executor=action.executor
            )
        )
        demand = self._queue.tasks[action.task].demand
        ticket = replace(self._tickets[action.task], priority=demand.priority)
        launch = Launch(ticket=ticket, gpus=action.gpus, attempt=action.attempt, executor=action.executor)
        self._running[action.task] = RunningAttempt(
            launch=launch,
            expected_s=demand.duration_s,
            launched_at=self._clock(),
            progress_before=self.retrying.progress(ticket),
        )
        self._cluster.start(launch)

    def _check_known(self, task: str) -> None:
        found = self._queue.tasks.get(task)
        if found is None or found.has_ended:
            what = "which is not in the queue" if found is None else f"which is {found.state.value}"
            raise QueueCommandError(f"expected a task of this queue that waits or runs, found {task!r}, {what}")

    def _check_not_draining(self) -> None:
        if self._is_draining:
            raise QueueCommandError(
                "expected a queue that runs, found one that is being drained; continue with: alto resume"
            )

    def _status_of(self, task: ScheduledTask) -> TaskStatus:
        attempt, ended = self._running.get(task.name), self._ended.get(task.name)
        state = task.state
        if self._is_draining and attempt is None and task.has_gpus:  # the queue does not know that it ended
            state = _state_after_drain(state, ended)
        return TaskStatus.of(
            task.demand,
            state=state,
            gpus=task.gpus if attempt is not None else (),
            attempt=task.attempt,
            fraction_done=_fraction_of(state, attempt),
            num_failures=task.num_failures,
            reason=task.reason,
            ended=ended,
            waits_for=task.waits_for if state is TaskState.WAITING else "",
        )

    def _now_s(self) -> float:
        return self._clock() - self._began_at


def _fraction_of(state: TaskState, attempt: RunningAttempt | None) -> float:
    if state is TaskState.FINISHED:
        return 1.0
    return fraction_done(attempt.history) if attempt is not None else 0.0


def _state_after_drain(state: TaskState, ended: AttemptEnded | None) -> TaskState:
    if ended is not None and ended.outcome is Outcome.FINISHED:
        return TaskState.FINISHED
    return TaskState.STOPPED if state is TaskState.STOPPING else TaskState.WAITING


def _is_valid(offer: journaled.GpusOffered) -> bool:
    """Return whether an offer has at least one GPU, and durations within bounds."""
    seconds = (offer.duration_s, offer.data_parallel_duration_s)
    return offer.num_gpus >= 1 and all(is_number(found, least=0, most=MAX_DURATION_S) for found in seconds)
