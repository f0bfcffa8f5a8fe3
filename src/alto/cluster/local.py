"""The GPUs or CPU slots of this machine, and the processes that work on them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from alto.cluster.base import ClusterEvent, Launch, check_launch
from alto.cluster.device_locks import DeviceLocks
from alto.cluster.executor_process import ProcessShape, Timeouts
from alto.cluster.machine import Machine
from alto.cluster.processes import num_cores
from alto.errors import SpecError, UnsupportedError
from alto.records import Node

NODE = "local"


class LocalCluster:
    """Executors on this machine: processes with their own GPUs, each for one task or for several that share it.

    On a machine without GPUs, CPU slots are used instead: a task that has n of m slots sees no CUDA device and uses n/m
    of the cores, at least one, and plans with n/m of the memory. With GPUs, tasks share the cores in the same way.

    A process whose tasks have ended is kept for a while because its base model is loaded. It ends when others need its
    GPUs.

    The GPUs are locked until the cluster is closed, so that no other controller of this user takes them. CPU slots are
    not locked.

    Args:
        total_gpus: Number of GPUs to use, starting with the first; None uses all. On a machine without GPUs, the number
            of its CPU slots; None means one.
        heartbeat_timeout_s: Longest time without a heartbeat after the first line of its journal. Then an executor is
            killed and ends as ``lost``. A heartbeat is a journal line, or a check of the training loop whether to stop.
        start_timeout_s: Longest time without a heartbeat before the first line, while it loads the model and the data.
        drain_timeout_s: An executor that was asked to stop, or whose controller has died, is killed after this long.
        idle_timeout_s: A process without a task is ended after this long.

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
                "cluster: expected Linux for 'local', which finds its processes in /proc, found a machine without it; "
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
        """False if CPU slots are used instead of GPUs."""
        return bool(self._devices)

    def start(self, launch: Launch) -> None:
        """Let a process work on a run: the process of its executor, an idle process that fits, or a new one."""
        check_launch(launch, self.nodes, self._machine.launches)
        self._machine.start(launch, self._shape(launch))

    def stop(self, task: str) -> None:
        """Let a running executor save and end; kill it if that takes too long."""
        self._machine.stop(task)

    def poll(self, timeout_s: float) -> list[ClusterEvent]:
        """Return the events since the last call, in order for each task."""
        return self._machine.poll(timeout_s)

    def close(self) -> None:
        """Kill running executors, then release the GPUs."""
        self._machine.close()
        self._locks.release()

    def _shape(self, launch: Launch) -> ProcessShape:
        num_gpus, num_all = len(launch.gpus), len(self._node.gpus)
        return ProcessShape(
            devices=tuple(self._devices[gpu.index] for gpu in launch.gpus) if self._devices else (),
            num_threads=max(1, num_cores() * num_gpus // num_all),
            num_ranks=launch.num_ranks,
            memory_share=1.0 if self._devices else num_gpus / num_all,
        )


def _visible_devices() -> tuple[str, ...]:
    """Return the GPUs that this process may use, under their names in CUDA: indices or UUIDs."""
    count = torch.cuda.device_count()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in chosen.split(",")] if chosen is not None else [str(i) for i in range(count)]
    return tuple(names[:count])


def _lock_name(index: int, name: str) -> str:
    """Return a name of GPU ``index`` that is the same in every process: its UUID.

    A MIG instance has its own UUID in CUDA_VISIBLE_DEVICES (``name``), which CUDA does not report.
    """
    return name if name.startswith("MIG-") else f"{torch.cuda.get_device_properties(index).uuid}"


def _num_gpus(requested: int | None, available: int) -> int:
    if requested is not None and requested < 1:
        raise SpecError(f"total_gpus: expected at least 1, found {requested}")
    if available and requested is not None and requested > available:
        raise SpecError(
            f"total_gpus: expected at most {available}, as many as this machine has, found {requested}; lower it"
        )
    return requested or available or 1
