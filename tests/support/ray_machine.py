"""A Ray cluster of several nodes on this machine: a head without slots, and nodes that tests add and kill."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
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

    def add_node(self, *, num_cpus: int = 2, num_gpus: int = 0, python_path: Path | None = None) -> Any:
        """Start a node; its ``node_id`` is Ray's. Its programs look for packages in ``python_path`` first."""
        return self._start(python_path, num_cpus=num_cpus, num_gpus=num_gpus)

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

    def _start(self, python_path: Path | None = None, **options: Any) -> Any:
        first = [] if python_path is None else [str(python_path)]
        paths = [*first, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(paths))
            patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
            return self._cluster.add_node(object_store_memory=STORE_BYTES, **options)


class RayHead:
    """A Ray cluster of one machine with one CPU, behind ``ray://``; made by ``ray start``, as users do.

    Args:
        folder: Its files; the path must be short, because the names of sockets are in it.
        ports: Three free ports.

    Attributes:
        environment: Variables that clients need.
    """

    def __init__(self, folder: Path, ports: Sequence[int]) -> None:
        gcs, client, agent = ports
        self.address = f"ray://127.0.0.1:{client}"
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.log = folder / "head.log"
        self._command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=1"]
        self._command += ["--node-ip-address=127.0.0.1", f"--port={gcs}", f"--ray-client-server-port={client}"]
        self._command += [f"--runtime-env-agent-port={agent}", "--include-dashboard=false", f"--temp-dir={folder}"]
        self._command += [f"--object-store-memory={STORE_BYTES}"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the head, without waiting until it answers."""
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            **self.environment,
            "PYTHONPATH": os.pathsep.join(paths),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def kill(self, *, executors: bool = True) -> None:
        """Kill all processes of Ray, and those that they started; without ``executors`` these stay alive."""
        if self._process is None:
            return
        # Programs of Ray start its workers; everything that workers start belongs to executors.
        for pid in (*_descendants(self._process.pid, None if executors else 2), self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None


def _descendants(pid: int, most_levels: int | None = None) -> Iterator[int]:
    """Return the processes that a process and its children have started; threads and processes may end meanwhile."""
    if most_levels == 0:
        return
    children: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                children += map(int, (task / "children").read_text(encoding="utf-8").split())
    for child in children:
        yield from _descendants(child, None if most_levels is None else most_levels - 1)
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
