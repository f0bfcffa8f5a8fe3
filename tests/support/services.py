"""Services for tests: real servers on a port of this machine, with simulated executors or none."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import uvicorn

from alto.engine.control_plane import ControlPlane, opened_control_plane
from alto.engine.queue_setup import QueueSetup
from alto.service.context import Service, control_folder
from alto.service.coordinator import Coordinator
from alto.service.coordinator.coordinator import OpenPlane
from alto.service.coordinator.leadership import LEASE_S, Leadership
from alto.service.serve import create_app, opened_service
from alto.service.settings import ServiceSettings
from alto.service.store.jobs import ENDED

__all__ = ["ROWS", "Served", "local_plane", "served", "wait_for"]

ROWS = "".join(
    json.dumps({"messages": [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": str(n + 1)}]})
    + "\n"
    for n in range(40)
).encode()
"""Rows of a small file for fine-tuning."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A running service.

    Attributes:
        url: Its address, without a path.
        service: The object that its handlers get.
        coordinator: Coordinator of its process; None if the process only answers.
    """

    url: str
    service: Service
    coordinator: Coordinator | None

    def client(self, key: str = "none", **settings: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **{"max_retries": 0, **settings})

    def upload(self, client: openai.OpenAI, content: bytes = ROWS) -> str:
        return client.files.create(file=("rows.jsonl", content), purpose="fine-tune").id

    def finished(self, client: openai.OpenAI, job: str) -> Any:
        """Return a job once it has ended."""
        wait_for(lambda: client.fine_tuning.jobs.retrieve(job).status in ENDED)
        return client.fine_tuning.jobs.retrieve(job)


@contextlib.contextmanager
def served(
    root: Path, *, open_plane: OpenPlane | None = None, lease_s: float = LEASE_S, **own: Any
) -> Iterator[Served]:
    """Run a server on a free port inside the context.

    Args:
        root: Data folder.
        open_plane: Opens the control plane of its coordinator; None has no coordinator.
        lease_s: Time of its lease as leader.
        own: Settings.
    """
    settings = ServiceSettings(**{"data_dir": str(root), "port": 0, **own})
    with opened_service(settings) as service:
        coordinator = None
        if open_plane is not None:
            coordinator = Coordinator(service, Leadership(service.store, lease_s=lease_s), open_plane)
            coordinator.start()
        try:
            with answering(service, coordinator) as url:
                yield Served(url=url, service=service, coordinator=coordinator)
        finally:
            if coordinator is not None:
                coordinator.stop()


@contextlib.contextmanager
def answering(service: Service, coordinator: Coordinator | None) -> Iterator[str]:
    """Yield the address at which a thread of this process answers for ``service``."""
    config = uvicorn.Config(
        create_app(service, coordinator),
        host="127.0.0.1",
        port=service.settings.port,
        log_config=None,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def local_plane(root: Path) -> OpenPlane:
    """Open a control plane with real executors on one slot of this machine; ``root`` is the service's data folder."""

    def opened(epoch: int) -> contextlib.AbstractContextManager[ControlPlane]:
        setup = QueueSetup(strategy="single", cluster="local", total_gpus=1, quotas={})
        return opened_control_plane(setup, control_folder(root, epoch))

    return opened


def wait_for(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Wait until a condition holds; the time limit is far beyond what a busy machine needs."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "the condition never held"
        time.sleep(0.05)
