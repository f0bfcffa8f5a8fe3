"""A service with simulated executors in a process of its own, which can be killed."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import httpx2
import pytest
from services import served, wait_for

from alto.service.coordinator.leadership import LEASE_S
from benchmarks.service.plane import simulated_plane
from benchmarks.service.simulated_cluster import SimulatedCluster

__all__ = ["ContainedService", "ServiceProcess", "skip_without_namespaces"]

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["services"])


class ServiceProcess:
    """A server on ``port``, with its data in ``root``; see :func:`main`."""

    def __init__(self, root: Path, port: int, *, waits_for: Path | None = None, lease_s: float = LEASE_S) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._arguments = (root, port, waits_for, lease_s)
        self._process = _CONTEXT.Process(target=main, args=self._arguments)

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        self._process = _CONTEXT.Process(target=main, args=self._arguments)
        # The fork server finds the modules to import, so that a service starts at once.
        with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
            self._process.start()
        wait_for(self._answers)

    def kill(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()

    def pause(self) -> None:
        """Stop the process until :meth:`go_on`."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let the process continue after a pause."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def running(self) -> Iterator[ServiceProcess]:
        self.start()
        try:
            yield self
        finally:
            self.kill()

    def _answers(self) -> bool:
        assert self._process.is_alive(), "the service ended"
        return _answers(self.url)


class ContainedService:
    """A server that is the first process of a PID namespace, as in a container: its process id is 1 there, and it sees
    no process outside. Its files, its network and its hostname are those of this machine.

    Args:
        root: Data folder.
        port: Port to listen on.
        database: Address of the database.
        lease_s: Time of its lease as leader.
    """

    def __init__(self, root: Path, port: int, *, database: str, lease_s: float) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._arguments = {"root": str(root), "port": port, "database": database, "lease_s": lease_s}
        self._log = root / f"{port}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, which answers soon."""
        enter = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*enter, sys.executable, "-m", "run_service", json.dumps(self._arguments)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        return _answers(self.url)

    def leads(self) -> bool:
        return self.answers() and "\nalto_leads 1\n" in httpx2.get(f"{self.url}/metrics").text


def skip_without_namespaces() -> None:
    """Skip the test if this user may not make PID namespaces."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no program unshare, of the package util-linux")
    tried = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], check=False, capture_output=True)
    if tried.returncode:
        pytest.skip(f"PID namespaces are not permitted: {tried.stderr.decode().strip()}")


def main(root: Path, port: int, waits_for: Path | None, lease_s: float, database: str | None = None) -> None:
    """Serve until the process is killed; runs wait in their middle for a file, if one is given."""
    plane = simulated_plane(root, lambda: SimulatedCluster(duration_s=0.3, waits_for=waits_for))
    with served(root, open_plane=plane, lease_s=lease_s, port=port, database=database):
        while True:
            time.sleep(1)


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx2.HTTPError):
        return bool(httpx2.get(f"{url}/healthz").status_code == 200)
    return False


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(Path(given["root"]), given["port"], None, given["lease_s"], given["database"])
