"""``alto serve``: the web application and the coordinator, in one process."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from alto.engine.control_plane import ControlPlane, opened_control_plane
from alto.engine.queue_setup import QueueSetup
from alto.errors import ServiceError
from alto.service.access import DEFAULT_TENANT, create_tenant, has_keys
from alto.service.app import create_app
from alto.service.context import Service
from alto.service.control import control_folder
from alto.service.coordinator import Coordinator
from alto.service.coordinator.leadership import Leadership
from alto.service.database import opened_store
from alto.service.files import Artefacts
from alto.service.logs import configure_logs
from alto.service.settings import ServiceSettings

__all__ = ["opened_service", "running", "serve"]


@contextlib.contextmanager
def opened_service(settings: ServiceSettings) -> Iterator[Service]:
    """The service of ``settings``: its folders made, its database migrated; until the block is left.

    Raises:
        ServiceError: The folder or the database cannot be used.
    """
    with opened_store(settings) as store:
        with store.writing() as session:
            create_tenant(session, DEFAULT_TENANT)
        yield Service(settings=settings, store=store, artefacts=Artefacts(settings.artefact_url))


@contextlib.contextmanager
def running(service: Service) -> Iterator[FastAPI]:
    """The application, with a coordinator beside it until the block is left."""
    coordinator = Coordinator(service, Leadership(service.store), lambda epoch: _plane(service.settings, epoch))
    app = create_app(service, coordinator)
    coordinator.start()
    try:
        yield app
    finally:
        coordinator.stop()


def serve(settings: ServiceSettings, *, on_ready: Callable[[str], None] = lambda url: None) -> None:
    """Answer requests until a signal ends the process; then running executors save and end.

    Args:
        on_ready: Called with the address once requests are answered.

    Raises:
        ServiceError: It would listen beyond this machine without keys; or as of :func:`opened_service`.
    """
    configure_logs(as_json=settings.json_logs)
    with opened_service(settings) as service:
        with service.store.reading() as session:
            if not settings.is_loopback and not has_keys(session):
                raise ServiceError(
                    f"host: expected an address of this machine alone, such as 127.0.0.1, while there are no keys, "
                    f"found {settings.host}; make a key first with: alto keys create"
                )
        with running(service) as app:
            _Server(app, settings, on_ready).run()


class _Server(uvicorn.Server):
    """Says when it answers."""

    def __init__(self, app: FastAPI, settings: ServiceSettings, on_ready: Callable[[str], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=5,
                server_header=False,
            )
        )
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ends by a signal as asked, and does not send it to itself once more, as uvicorn does: executors are to save
        first. A second signal has its usual effect."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")


def _plane(settings: ServiceSettings, epoch: int) -> contextlib.AbstractContextManager[ControlPlane]:
    setup = QueueSetup(strategy=settings.strategy, cluster=settings.cluster, total_gpus=settings.total_gpus, quotas={})
    return opened_control_plane(setup, control_folder(settings.root, epoch))
