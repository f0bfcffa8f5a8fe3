"""A Ray cluster of several nodes on this machine: a head without slots, and nodes that tests add and kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

STORE_BYTES = 80 * 2**20
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 4,
}
"""Settings with which a node that dies without a message is found in seconds instead of half a minute."""


class RayMachine:
    """A cluster whose executors find ``cluster_hosts``."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        self._start(num_cpus=0, include_dashboard=False, _system_config=HEALTH)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def connect(self) -> None:
        import ray

        ray.init(address=self.address, log_to_driver=False)

    def add_node(self, *, num_cpus: int = 2, num_gpus: int = 0) -> Any:
        """Start a node; its ``node_id`` is Ray's."""
        return self._start(num_cpus=num_cpus, num_gpus=num_gpus)

    def kill_node(self, node: Any) -> None:
        """Kill a node with everything on it, as when its power fails."""
        (raylet,) = node.all_processes["raylet"]
        processes = list(_descendants(raylet.process.pid))
        self._cluster.remove_node(node, allow_graceful=False)
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def is_alive(self, node: Any) -> bool:
        """Return whether a node lives, as far as Ray knows, which learns it after a moment."""
        import ray

        return any(row["NodeID"] == node.node_id and row["Alive"] for row in ray.nodes())

    def shutdown(self) -> None:
        """Disconnect, and end all nodes."""
        import ray

        ray.shutdown()
        self._cluster.shutdown()

    def _start(self, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
            patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
            return self._cluster.add_node(object_store_memory=STORE_BYTES, **options)


def _descendants(pid: int) -> Iterator[int]:
    """Return actors, and the executors that they started; threads and processes may end meanwhile."""
    children: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                children += map(int, (task / "children").read_text(encoding="utf-8").split())
    for child in children:
        yield from _descendants(child)
        yield child


@contextmanager
def ray_machine() -> Iterator[RayMachine]:
    """Run a head, to which this process is connected."""
    machine = RayMachine()
    try:
        machine.connect()
        yield machine
    finally:
        machine.shutdown()
