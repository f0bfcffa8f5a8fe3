"""The GPUs of this machine, or slots of its CPU, and the processes that work on them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from alto.cluster.base import ClusterEvent, Launch
from alto.cluster.device_locks import DeviceLocks
from alto.cluster.executor_process import ProcessShape
from alto.cluster.launches import check_launch
from alto.cluster.local_executor import Timeouts
from alto.cluster.machine import Machine
from alto.errors import SpecError, UnsupportedError
from alto.records import Node

__all__ = ["LocalCluster"]

NODE = "local"


class LocalCluster:
    """Executors on this machine: processes on GPUs of their own, each for one task or for several that share it.

    On a machine without GPUs, slots of its CPU stand for them: a task that has n of m slots sees no CUDA and takes
    n/m of the cores, at least one. On GPUs, tasks share the cores in the same way.

    A process whose tasks have ended is kept for a while: its base model is loaded. It ends when others need its GPUs.

    Its GPUs are locked until it is closed, so that no other controller of this user takes them; CPU slots are not.

    Args:
        total_gpus: How many GPUs to use, the first ones; None uses all. On a machine without, how many slots its CPU
            has; None makes it one.
        heartbeat_timeout_s: An executor that has written into its journal and then shows no sign of life for so long is
            killed and ends as ``lost``. Signs are journal lines, and checks of its training loop whether to stop.
        start_timeout_s: The same before its first journal line, while it loads the model and reads the data.
        drain_timeout_s: An executor that was asked to stop, or whose controller has died, is killed after so long.
        idle_timeout_s: A process without a task ends after so long.

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
        idle_timeout_s: float = 60.0,
    ) -> None:
        if not Path("/proc/self/stat").exists():
            raise UnsupportedError(
                "cluster: 'local' keeps account of its processes as Linux lists them, found a machine without /proc; "
                "run one task at a time with: alto tune"
            )
        timeouts = Timeouts(heartbeat_s=heartbeat_timeout_s, start_s=start_timeout_s, drain_s=drain_timeout_s)
        self._devices = _visible_devices()
        self._node = Node(name=NODE, gpus=tuple(range(_num_gpus(total_gpus, len(self._devices)))))
        used = range(len(self._node.gpus)) if self._devices else ()
        self._locks = DeviceLocks([_lock_name(index, self._devices[index]) for index in used])
        self._machine = Machine(timeouts, idle_timeout_s=idle_timeout_s)

    @property
    def nodes(self) -> Sequence[Node]:
        """This machine."""
        return (self._node,)

    @property
    def has_gpus(self) -> bool:
        """False where slots of the CPU stand for GPUs."""
        return bool(self._devices)

    def start(self, launch: Launch) -> None:
        """Have a process work on a run: the one of its executor, an idle one that fits, or a new one."""
        check_launch(launch, self.nodes, self._machine.launches)
        self._machine.start(launch, self._shape(launch))

    def stop(self, task: str) -> None:
        """Let a running executor save and end; it is killed if that takes too long."""
        self._machine.stop(task)

    def poll(self, timeout_s: float) -> list[ClusterEvent]:
        """What has happened since the last call, oldest first of every task."""
        return self._machine.poll(timeout_s)

    def close(self) -> None:
        """Kill what still runs, then release the GPUs."""
        self._machine.close()
        self._locks.release()

    def _shape(self, launch: Launch) -> ProcessShape:
        return ProcessShape(
            devices=tuple(self._devices[gpu.index] for gpu in launch.gpus) if self._devices else (),
            num_threads=max(1, _num_cores() * len(launch.gpus) // len(self._node.gpus)),
            num_ranks=launch.num_ranks,
        )


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
    """Cores that this process may use; no more than ``OMP_NUM_THREADS`` says, where the user has set it."""
    found = len(os.sched_getaffinity(0))
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # further numbers are of nested regions
    return min(found, int(asked)) if asked.isdecimal() and int(asked) > 0 else found
