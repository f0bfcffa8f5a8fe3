"""A service with simulated executors in a process of its own, which can be killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import httpx2
from services import served, wait_for

from benchmarks.service.plane import simulated_plane
from benchmarks.service.simulated_cluster import SimulatedCluster

__all__ = ["ServiceProcess"]

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["services"])


class ServiceProcess:
    """A server on ``port``, with its data in ``root``; see :func:`main`."""

    def __init__(self, root: Path, port: int, *, waits_for: Path | None = None) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._arguments = (root, port, waits_for)
        self._process = _CONTEXT.Process(target=main, args=self._arguments)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._process = _CONTEXT.Process(target=main, args=self._arguments)
        # The server of forks finds what it is to have imported, so that a service begins in no time.
        with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
            self._process.start()
        wait_for(self._answers)

    def kill(self) -> None:
        """Kill it, as the kernel does."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()

    def pause(self) -> None:
        """Let it stand still."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on after a pause."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def running(self) -> Iterator[ServiceProcess]:
        """The process until the block is left."""
        self.start()
        try:
            yield self
        finally:
            self.kill()

    def _answers(self) -> bool:
        assert self._process.is_alive(), "the service ended"
        with contextlib.suppress(httpx2.HTTPError):
            return bool(httpx2.get(f"{self.url}/healthz").status_code == 200)
        return False


def main(root: Path, port: int, waits_for: Path | None) -> None:
    """Answer until the process is killed; runs wait in their middle for a file, where one is given."""
    plane = simulated_plane(root, lambda: SimulatedCluster(duration_s=0.3, waits_for=waits_for))
    with served(root, open_plane=plane, port=port):
        while True:
            time.sleep(1)
