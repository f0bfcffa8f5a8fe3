"""Starts, watches and ends the executors on this machine."""

from __future__ import annotations

import contextlib
import time
from functools import partial

from alto.cluster.base import ClusterEvent, ExecutorEnded, Launch
from alto.cluster.entry import ending_by
from alto.cluster.executor_process import ProcessShape
from alto.cluster.local_executor import LocalExecutor, Timeouts
from alto.cluster.process_pool import ProcessPool

__all__ = ["Machine"]

WATCH_INTERVAL_S = 0.05


class Machine:
    """Runs in progress on this machine, each in its own process or together with others.

    Args:
        timeouts: Timeouts of executors, in seconds.
        idle_timeout_s: Seconds after which a process without a run is ended.
    """

    def __init__(self, timeouts: Timeouts, *, idle_timeout_s: float) -> None:
        self._timeouts = timeouts
        self._pool = ProcessPool(drain_timeout_s=timeouts.drain_s, idle_timeout_s=idle_timeout_s)
        self._executors: dict[str, tuple[LocalExecutor, ProcessShape]] = {}
        self._events: list[ClusterEvent] = []

    @property
    def launches(self) -> list[Launch]:
        """The launches that have not ended."""
        return [executor.launch for executor, _ in self._executors.values()]

    def start(self, launch: Launch, shape: ProcessShape) -> None:
        """Let a process work on a run: the process of its executor, an idle process that fits, or a new one.

        Args:
            launch: The run; if no process can work on it, the next :meth:`poll` reports its end.
            shape: Resources that the process must have.
        """
        try:
            self._executors[launch.task] = LocalExecutor(launch, self._pool.find(launch, shape), self._timeouts), shape
        except OSError as error:
            ending = ending_by(error)
            self._events.append(
                ExecutorEnded(
                    task=launch.task,
                    attempt=launch.attempt,
                    outcome=ending.outcome,
                    reason=str(error),
                    error=ending.error,
                )
            )

    def stop(self, task: str) -> None:
        """Let a run save and end; kill its process if that takes too long."""
        if task in self._executors:
            self._executors[task][0].ask_to_stop()

    def poll(self, timeout_s: float) -> list[ClusterEvent]:
        """Return the events since the last call, in order for each task; wait up to ``timeout_s`` for some."""
        gives_up_at = time.monotonic() + timeout_s
        while True:
            self._watch()
            # If a process has meanwhile ended, report the end of all its runs together, as no run can join it any more.
            while self._events and any(executor.process.has_ended() for executor, _ in self._executors.values()):
                self._watch()
            self._pool.end_idle()
            if self._events or time.monotonic() >= gives_up_at:
                events, self._events = self._events, []
                return events
            time.sleep(WATCH_INTERVAL_S)

    def _watch(self) -> None:
        for task, (executor, shape) in list(self._executors.items()):
            new = executor.watch()
            if executor.was_ignored:
                with contextlib.suppress(OSError):  # the next watch reports its end
                    executor.move(partial(self._pool.find, executor.launch, shape))
            self._events += new
            if new and isinstance(new[-1], ExecutorEnded):
                del self._executors[task]

    def close(self) -> None:
        """Kill running executors; no process is left when this returns. Idempotent."""
        self._pool.close()
        self._executors = {}
