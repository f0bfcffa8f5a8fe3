"""Drives a queue with a cluster: what the queue wants is done, what happens is told to it, all of it is journaled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from alto.cluster.base import Cluster, ClusterEvent, ExecutorEnded, GpuCame, GpuGone, Launch, Outcome, Told
from alto.errors import TaskInterruptedError
from alto.runs import Journal, Observer, QueueDir, QueueEntry, RunHistory, gpus_to_json, has_result
from alto.scheduler import TaskDemand, remaining_duration_s
from alto.scheduler.queue import (
    Action,
    Failed,
    Finished,
    GaveUp,
    GpuAdded,
    GpuLost,
    Offered,
    Planned,
    Progressed,
    Queue,
    QueueEvent,
    Started,
    StartTask,
    StopTask,
    Submitted,
    Woken,
)

__all__ = ["Controller"]

POLL_S = 1.0
"""How long nothing at all is looked at; a signal of the user is heeded within it."""

_STANDS = frozenset({"eval", "warmup_ended", "job_exited", "job_completed"})
"""Events of a run that say how far it is."""


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """An executor that runs, and what is known of its pace; ``start_s`` is what it took until it began to train."""

    launch: Launch
    expected_s: float
    launched_at: float
    start_s: float = 0.0
    history: RunHistory = field(default_factory=RunHistory)
    began_at: float | None = None
    share_before: float = 0.0


class Controller:
    """Runs the tasks of one queue to their ends.

    Args:
        queue: Made for the cluster's nodes; nothing has been told to it yet.
        done: Tasks that have their result from before.
        trusted: Tasks that may run the Python code that comes with their base model.
        observers: Shown every line of the journals of the tasks' runs, as ``{"event": "told", "task", "line"}``.
        is_interrupted: Asked every second; once true, the executors save and end, and the queue can be resumed.
    """

    def __init__(
        self,
        entries: Sequence[QueueEntry],
        queue: Queue,
        cluster: Cluster,
        *,
        queue_dir: QueueDir,
        journal: Journal,
        num_ranks: Callable[[int], int] = lambda num_gpus: 1,
        done: Iterable[str] = (),
        trusted: Iterable[str] = (),
        observers: Sequence[Observer] = (),
        is_interrupted: Callable[[], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._entries = {entry.task: entry for entry in entries}
        self._queue = queue
        self._cluster = cluster
        self._queue_dir = queue_dir
        self._journal = journal
        self._num_ranks = num_ranks
        self._observers = tuple(observers)
        self._is_interrupted = is_interrupted or (lambda: False)
        self._clock = clock
        self._began_at = clock()
        self._trusted = frozenset(trusted)
        self._open = {task for task in self._entries if task not in set(done)}
        self._running: dict[str, _Attempt] = {}

    def run(self) -> None:
        """Until every task has its result or was given up; which, is in the journal.

        Raises:
            TaskInterruptedError: It was asked to stop; everything is on disk.
            RunWriteError: The journal cannot be written.
        """
        now_s = self._now_s()
        self._tell(
            *(
                Submitted(
                    time_s=now_s,
                    demand=TaskDemand(
                        task=entry.task,
                        num_gpus=entry.num_gpus,
                        duration_s=entry.duration_s,
                        release_s=now_s,
                        priority=entry.priority,
                        tenant=entry.tenant,
                    ),
                )
                for entry in self._entries.values()
                if entry.task in self._open
            )
        )
        while self._open:
            if self._is_interrupted():
                self._drain()
            wake_s = self._queue.next_wake_s
            wait_s = POLL_S if wake_s is None else min(POLL_S, max(0.0, wake_s - self._now_s()))
            for event in self._cluster.poll(wait_s):
                self._handle(event)
            if wake_s is not None and wake_s <= self._now_s():
                self._tell(Woken(time_s=self._now_s()))

    # -- from the cluster to the queue ---------------------------------------------------------------------------

    def _handle(self, event: ClusterEvent) -> None:
        match event:
            case Told():
                self._handle_line(event)
            case ExecutorEnded():
                self._handle_end(event)
            case GpuGone(gpu=gpu):
                self._journal.append("gpu_lost", node=gpu.node, index=gpu.index)
                self._tell(GpuLost(time_s=self._now_s(), gpu=gpu))
            case GpuCame(gpu=gpu):
                self._journal.append("gpu_added", node=gpu.node, index=gpu.index)
                self._tell(GpuAdded(time_s=self._now_s(), gpu=gpu))

    def _handle_line(self, told: Told) -> None:
        attempt = self._running.get(told.task)
        if attempt is None or attempt.launch.attempt != told.attempt:
            return
        attempt.history.apply(told.event)
        for observer in self._observers:
            observer({"event": "told", "task": told.task, "line": told.event})
        name, share = told.event.get("event"), attempt.history.settled_share
        if name in ("task_started", "task_resumed"):
            attempt.began_at, attempt.share_before = self._clock(), share
            attempt.start_s = attempt.began_at - attempt.launched_at
            self._tell(Started(time_s=self._now_s(), task=told.task, attempt=told.attempt))
        elif name == "gpus_offered":
            line = told.event
            self._tell(
                Offered(
                    time_s=self._now_s(),
                    task=told.task,
                    attempt=told.attempt,
                    num_gpus=line["num_gpus"],
                    duration_s=attempt.start_s + line["duration_s"],
                    kept_duration_s=line["spread_duration_s"],
                )
            )
        elif name in _STANDS and attempt.began_at is not None:
            remaining_s = remaining_duration_s(
                attempt.expected_s,
                elapsed_s=self._clock() - attempt.began_at,
                share_before=attempt.share_before,
                share_done=share,
            )
            self._tell(Progressed(time_s=self._now_s(), task=told.task, attempt=told.attempt, remaining_s=remaining_s))

    def _handle_end(self, ended: ExecutorEnded) -> None:
        attempt = self._running.get(ended.task)
        if attempt is None or attempt.launch.attempt != ended.attempt:
            return
        del self._running[ended.task]
        ended = self._as_its_result_says(ended)
        self._journal_end(ended)
        if ended.outcome is Outcome.FINISHED:
            self._open.discard(ended.task)
            self._tell(Finished(time_s=self._now_s(), task=ended.task, attempt=ended.attempt))
            return
        self._tell(
            Failed(
                time_s=self._now_s(),
                task=ended.task,
                attempt=ended.attempt,
                reason=ended.reason,
                is_retryable=ended.outcome is not Outcome.FAILED,
                remaining_s=max(attempt.expected_s * (1.0 - attempt.history.settled_share), 1.0),
            )
        )

    # -- from the queue to the cluster ---------------------------------------------------------------------------

    def _tell(self, *events: QueueEvent) -> None:
        for action in self._queue.apply(*events):
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Planned(reason=reason, schedule=schedule):
                self._journal.append(
                    "planned",
                    reason=reason,
                    method=schedule.method,
                    status=schedule.status,
                    makespan_s=schedule.makespan_s,
                    bound_s=schedule.bound_s,
                    notice=schedule.notice,
                    placements=[
                        {
                            "task": placement.task,
                            "gpus": gpus_to_json(placement.gpus),
                            "start_s": placement.start_s,
                            "duration_s": placement.duration_s,
                        }
                        for placement in schedule.placements
                    ],
                )
            case StartTask(task=task, gpus=gpus, attempt=number):
                self._journal.append("executor_started", task=task, attempt=number, gpus=gpus_to_json(gpus))
                launch = Launch(
                    task=task,
                    run_dir=str(self._queue_dir.run_of(task).root),
                    gpus=gpus,
                    attempt=number,
                    num_ranks=self._num_ranks(len(gpus)),
                    trust_remote_code=task in self._trusted,
                )
                self._running[task] = _Attempt(
                    launch=launch,
                    expected_s=self._queue.tasks[task].demand.duration_s,
                    launched_at=self._clock(),
                )
                self._cluster.start(launch)
            case StopTask(task=task):
                self._cluster.stop(task)
            case GaveUp(task=task, reason=reason):
                self._journal.append("task_given_up", task=task, reason=reason)
                self._open.discard(task)

    def _drain(self) -> None:
        """Let every executor save and end; then so does the queue."""
        for task in self._running:
            self._cluster.stop(task)
        while self._running:
            for event in self._cluster.poll(POLL_S):
                if isinstance(event, ExecutorEnded) and event.task in self._running:
                    del self._running[event.task]
                    event = self._as_its_result_says(event)
                    if event.outcome is Outcome.FINISHED:
                        self._open.discard(event.task)
                    self._journal_end(event)
        self._journal.append("queue_interrupted", open=sorted(self._open))
        raise TaskInterruptedError(
            f"stopped as asked, with {len(self._open)} of {len(self._entries)} tasks still to finish and everything on "
            f"disk; go on with: alto resume {self._queue_dir.root}"
        )

    def _as_its_result_says(self, ended: ExecutorEnded) -> ExecutorEnded:
        """A task that has its result is finished, whatever ended its executor afterwards."""
        if ended.outcome is Outcome.FINISHED or not has_result(self._queue_dir.run_of(ended.task)):
            return ended
        return replace(ended, outcome=Outcome.FINISHED, reason=f"Ended after it had its result: {ended.reason}")

    def _journal_end(self, ended: ExecutorEnded) -> None:
        self._journal.append(
            "executor_ended", task=ended.task, attempt=ended.attempt, outcome=ended.outcome.value, reason=ended.reason
        )

    def _now_s(self) -> float:
        return self._clock() - self._began_at
