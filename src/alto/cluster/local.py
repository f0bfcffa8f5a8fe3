"""The GPUs of this machine, or slots of its CPU, and a process group for every task."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from alto.cluster.base import ClusterEvent, ExecutorEnded, Launch
from alto.cluster.device_locks import DeviceLocks
from alto.cluster.entry import ending_by
from alto.cluster.launches import check_launch
from alto.cluster.local_executor import LocalExecutor, Timeouts
from alto.cluster.zygote import Zygote
from alto.errors import SpecError, UnsupportedError
from alto.records import Node

__all__ = ["LocalCluster"]

NODE = "local"
WATCH_INTERVAL_S = 0.05


class LocalCluster:
    """Executors on this machine, each a session of processes on GPUs of its own.

    On a machine without GPUs, slots of its CPU stand for them: a task that has n of m slots sees no CUDA and takes
    n/m of the cores, at least one. On GPUs, tasks share the cores in the same way.

    Its GPUs are locked until it is closed, so that no other controller of this user takes them; CPU slots are not.

    Args:
        total_gpus: How many GPUs to use, the first ones; None uses all. On a machine without, how many slots its CPU
            has; None makes it one.
        heartbeat_timeout_s: An executor that has written into its journal and then shows no sign of life for so long is
            killed and ends as ``lost``. Signs are journal lines, and checks of its training loop whether to stop.
        start_timeout_s: The same before its first journal line, while it loads the model and reads the data.
        drain_timeout_s: An executor that was asked to stop, or whose controller has died, is killed after so long.

    Raises:
        DeviceBusyError: Another controller uses one of the GPUs; the message names the GPU and the process.
        SpecError: There are fewer GPUs than asked for.
        UnsupportedError: The machine does not run Linux.
    """

    def __init__(
        self,
        *,
        total_gpus: int | None = None,
        heartbeat_timeout_s: float = 300.0,
        start_timeout_s: float = 3600.0,
        drain_timeout_s: float = 120.0,
    ) -> None:
        if not Path("/proc/self/stat").exists():
            raise UnsupportedError(
                "cluster: 'local' keeps account of its processes as Linux lists them, found a machine without /proc; "
                "run one task at a time with: alto tune"
            )
        self._timeouts = Timeouts(heartbeat_s=heartbeat_timeout_s, start_s=start_timeout_s, drain_s=drain_timeout_s)
        self._devices = _visible_devices()
        self._node = Node(name=NODE, gpus=tuple(range(_num_gpus(total_gpus, len(self._devices)))))
        used = range(len(self._node.gpus)) if self._devices else ()
        self._locks = DeviceLocks([_lock_name(index, self._devices[index]) for index in used])
        self._executors: dict[str, LocalExecutor] = {}
        self._events: list[ClusterEvent] = []

    @property
    def nodes(self) -> Sequence[Node]:
        """This machine."""
        return (self._node,)

    @property
    def has_gpus(self) -> bool:
        """False where slots of the CPU stand for GPUs."""
        return bool(self._devices)

    def start(self, launch: Launch) -> None:
        """Start an executor in a session of its own."""
        check_launch(launch, self.nodes, [executor.launch for executor in self._executors.values()])
        num_threads = _num_cores() * len(launch.gpus) // len(self._node.gpus)
        try:
            self._executors[launch.task] = LocalExecutor(
                launch,
                Zygote.shared(),
                devices=tuple(self._devices[gpu.index] for gpu in launch.gpus) if self._devices else (),
                num_threads=max(1, num_threads),
                timeouts=self._timeouts,
            )
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
        """Let a running executor save and end; it is killed if that takes too long."""
        if task in self._executors:
            self._executors[task].ask_to_stop()

    def poll(self, timeout_s: float) -> list[ClusterEvent]:
        """What has happened since the last call, oldest first of every task."""
        gives_up_at = time.monotonic() + timeout_s
        while True:
            for task, executor in list(self._executors.items()):
                new = executor.watch()
                self._events += new
                if new and isinstance(new[-1], ExecutorEnded):
                    del self._executors[task]
            if self._events or time.monotonic() >= gives_up_at:
                events, self._events = self._events, []
                return events
            time.sleep(WATCH_INTERVAL_S)

    def close(self) -> None:
        """Kill what still runs, then release the GPUs."""
        while self._executors:
            self._executors = {task: executor for task, executor in self._executors.items() if not executor.kill()}
            if self._executors:
                time.sleep(WATCH_INTERVAL_S)
        self._locks.release()


def _visible_devices() -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA names them: indices or UUIDs."""
    count = torch.cuda.device_count()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in chosen.split(",")] if chosen is not None else [str(i) for i in range(count)]
    return tuple(names[:count])


def _lock_name(index: int, name: str) -> str:
    """What the GPU with this number, called ``name`` in CUDA_VISIBLE_DEVICES, is called in every process.

    A part of a GPU (MIG) has a UUID of its own there, which CUDA does not report."""
    return name if name.startswith("MIG-") else f"{torch.cuda.get_device_properties(index).uuid}"


def _num_gpus(asked: int | None, found: int) -> int:
    if asked is not None and asked < 1:
        raise SpecError(f"total_gpus: expected at least 1, found {asked}")
    if found and asked is not None and asked > found:
        raise SpecError(f"total_gpus: expected at most {found}, as many as this machine has, found {asked}; lower it")
    return asked or found or 1


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
