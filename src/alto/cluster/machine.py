"""Starts, watches and ends the executors on this machine."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from functools import partial

from alto.cluster.base import AttemptEnded, ClusterEvent, Launch
from alto.cluster.executor_process import ExecutorProcess, ProcessShape, Timeouts, WatchedRun
from alto.cluster.host import ending_by
from alto.cluster.zygote import Zygote
from alto.records import Gpu

POOL_INTERVAL_S = 0.01


class ProcessPool:
    """Processes that work on runs, and idle ones that can be reused."""

    def __init__(self, *, drain_timeout_s: float, idle_timeout_s: float) -> None:
        self._drain_timeout_s = drain_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._gpus: dict[ExecutorProcess, tuple[Gpu, ...]] = {}
        self._idle_since: dict[ExecutorProcess, float] = {}

    def find(self, launch: Launch, shape: ProcessShape) -> ExecutorProcess:
        """Return the process for a run; end idle processes that hold its GPUs and cannot work on it.

        Args:
            launch: The run; its GPUs are free, or belong to its executor.

        Raises:
            OSError: The process cannot be started, or the executor's process is ending.
        """
        process = self._of_executor(launch) or self._idle(launch, shape)
        for other in [other for other in self._gpus if other is not process and not other.runs]:
            if not set(launch.gpus).isdisjoint(self._gpus[other]):
                self._end(other)
        process = process or ExecutorProcess(Zygote.shared(), shape, launch.host, grace_s=self._drain_timeout_s)
        self._gpus[process] = launch.gpus
        self._idle_since.pop(process, None)
        return process

    def end_idle(self) -> None:
        """End the processes that have been idle for too long, and those that cannot be reused."""
        now = time.monotonic()
        for process in [process for process in self._gpus if not process.runs]:
            since = self._idle_since.setdefault(process, now)
            if not process.is_reusable or process.has_ended() or now - since > self._idle_timeout_s:
                self._end(process)

    def close(self) -> None:
        """Kill all processes; none is left when this returns."""
        for process in self._gpus:
            process.kill()
        for process in list(self._gpus):
            self._end(process)

    def _of_executor(self, launch: Launch) -> ExecutorProcess | None:
        """Return the process that works on other runs of the same executor."""
        for process in self._gpus if launch.executor else ():
            of_it = any(found.launch.executor == launch.executor for found in process.runs)
            if of_it and not process.has_ended():
                if not process.is_reusable:
                    raise OSError(f"expected {launch.executor} to accept another task, found that it is ending")
                return process
        return None

    def _idle(self, launch: Launch, shape: ProcessShape) -> ExecutorProcess | None:
        """Return an idle process of ``shape`` that has loaded the base model of a run; None if there is none. It may
        have run on other CPU slots before, because all CPU slots are equal."""
        if launch.num_ranks > 1 or launch.trust_remote_code:
            return None
        for process in self._gpus:
            is_ready = process.is_reusable and not process.runs and not process.has_ended()
            if is_ready and process.shape == shape and process.base == launch.base:
                return process
        return None

    def _end(self, process: ExecutorProcess) -> None:
        """Kill a process, and wait until nothing of it is left, because its memory is needed."""
        while not process.kill():
            time.sleep(POOL_INTERVAL_S)
        process.close()
        del self._gpus[process]
        self._idle_since.pop(process, None)


WATCH_INTERVAL_S = 0.05


class Machine:
    """Runs in progress on this machine, each in its own process or together with others.

    Args:
        idle_timeout_s: Seconds after which a process without a run is ended.
    """

    def __init__(self, timeouts: Timeouts, *, idle_timeout_s: float) -> None:
        self._timeouts = timeouts
        self._pool = ProcessPool(drain_timeout_s=timeouts.drain_s, idle_timeout_s=idle_timeout_s)
        self._runs: dict[str, tuple[WatchedRun, ProcessShape]] = {}
        self._events: list[ClusterEvent] = []

    @property
    def launches(self) -> list[Launch]:
        """The launches that have not ended."""
        return [run.launch for run, _ in self._runs.values()]

    def start(self, launch: Launch, shape: ProcessShape) -> None:
        """Let a process work on a run: the process of its executor, an idle process that fits, or a new one.

        Args:
            launch: The run; if no process can work on it, the next :meth:`poll` reports its end.
        """
        try:
            self._runs[launch.task] = WatchedRun(launch, self._pool.find(launch, shape), self._timeouts), shape
        except OSError as error:
            self._events.append(AttemptEnded.of(launch, replace(ending_by(error), reason=str(error))))

    def stop(self, task: str) -> None:
        """Let a run save and end; kill its process if that takes too long."""
        if task in self._runs:
            self._runs[task][0].ask_to_stop()

    def poll(self, timeout_s: float) -> list[ClusterEvent]:
        """Return the events since the last call, in order for each task; wait up to ``timeout_s`` for some."""
        gives_up_at = time.monotonic() + timeout_s
        while True:
            self._watch()
            # If a process has meanwhile ended, report the end of all its runs together, as no run can join it any more.
            while self._events and any(run.process.has_ended() for run, _ in self._runs.values()):
                self._watch()
            self._pool.end_idle()
            if self._events or time.monotonic() >= gives_up_at:
                events, self._events = self._events, []
                return events
            time.sleep(WATCH_INTERVAL_S)

    def _watch(self) -> None:
        for task, (run, shape) in list(self._runs.items()):
            new = run.watch()
            if run.was_ignored:
                with contextlib.suppress(OSError):  # the next watch reports its end
                    run.move(partial(self._pool.find, run.launch, shape))
            self._events += new
            if new and isinstance(new[-1], AttemptEnded):
                del self._runs[task]

    def close(self) -> None:
        """Kill running executors; no process is left when this returns. Idempotent."""
        self._pool.close()
        self._runs = {}
