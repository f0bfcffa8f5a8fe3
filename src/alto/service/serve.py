"""``alto serve``: the web application and the coordinator, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from alto.engine.control_plane import ControlPlane, opened_control_plane
from alto.engine.queue_setup import QueueSetup
from alto.errors import ServiceError
from alto.service.access import DEFAULT_TENANT, create_tenant, has_keys
from alto.service.api import cluster, drafts, health, streams, tasks
from alto.service.api import models as own_models
from alto.service.api.models import ModelExports
from alto.service.api.streams import Followers
from alto.service.context import Service, control_folder, history_before
from alto.service.coordinator import Coordinator
from alto.service.coordinator.leadership import Leadership
from alto.service.dashboard import router as dashboard
from alto.service.dashboard.rendering import error_page
from alto.service.database import opened_store
from alto.service.files import Artefacts
from alto.service.openai import files, jobs, models, unsupported, uploads
from alto.service.settings import ServiceSettings
from alto.service.vllm import chat
from alto.service.web.answers import ERROR_ANSWERS, RequestCounts, RequestIds, add_error_answers, describe_keys
from alto.service.web.bodies import BodyLimits
from alto.version import __version__

KEEP_ALIVE_S = 75
"""Seconds after which an idle connection is closed: longer than clients and proxies keep one (5 to 60 s), so that none
sends a request at the moment in which the server closes the connection."""


def create_app(service: Service, coordinator: Coordinator | None = None) -> FastAPI:
    """Return the application that serves ``service``; ``coordinator`` is this process's coordinator, if it has one."""
    app = FastAPI(title="ALTO", version=__version__, docs_url=None, redoc_url=None)
    app.state.service, app.state.coordinator = service, coordinator
    app.state.model_exports = ModelExports(service)
    add_error_answers(app, error_page)
    describe_keys(app)
    app.state.request_counts = RequestCounts()
    app.include_router(health.router)
    app.state.followers = Followers(service.store)
    for part in (tasks, streams, cluster, drafts, own_models):
        app.include_router(part.router, prefix="/api", responses=dict(ERROR_ANSWERS))
    for part in (files, uploads, jobs, models, chat, unsupported):
        app.include_router(part.router, prefix="/v1", responses=dict(ERROR_ANSWERS))
    app.include_router(dashboard)
    settings = service.settings
    app.add_middleware(
        BodyLimits,
        max_upload_bytes=settings.max_upload_bytes,
        max_request_bytes=settings.max_request_bytes,
    )
    app.add_middleware(RequestIds, counts=app.state.request_counts)
    return app


_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def configure_logs(*, as_json: bool) -> None:
    """Write the logs of the service and of its web server to stderr, and only warnings of all other packages."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if as_json else _Lines())
    for name in ("alto.service", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)


def _facts_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return a record's extra fields, except names with a leading underscore, which belong to other packages (Ray)."""
    facts = vars(record).items()
    return {key: value for key, value in facts if key not in _OWN and not key.startswith("_") and value is not None}


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_facts_of(record),
        }
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        return json.dumps(facts, default=str)


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = " ".join(f"{key}={value}" for key, value in _facts_of(record).items() if key != "color_message")
        line = f"{time.strftime('%H:%M:%S')} {record.levelname.lower()} {record.getMessage()} {facts}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


@contextlib.contextmanager
def opened_service(settings: ServiceSettings) -> Iterator[Service]:
    """Yield the service of ``settings``, with its folders created and its database migrated; close it afterwards.

    Raises:
        ServiceError: The folder or the database cannot be used.
    """
    with opened_store(settings) as store:
        with store.writing() as session:
            create_tenant(session, DEFAULT_TENANT)
        yield Service(settings=settings, store=store, artefacts=Artefacts(settings.artefact_url))


@contextlib.contextmanager
def running(service: Service) -> Iterator[FastAPI]:
    """Yield the application, and run a coordinator until the block is left."""
    coordinator = Coordinator(service, Leadership(service.store), _Planes(service.settings).opened)
    app = create_app(service, coordinator)
    coordinator.start()
    try:
        yield app
    finally:
        coordinator.stop()


@contextlib.contextmanager
def listening(settings: ServiceSettings) -> Iterator[list[socket.socket]]:
    """Yield sockets bound to the host and port of ``settings``; close them afterwards.

    Raises:
        ServiceError: The port is in use or not permitted, or the address does not belong to this machine.
    """
    with contextlib.ExitStack() as opened:
        try:
            found = _bound(settings.host, settings.port, opened)
        except OSError as error:
            raise ServiceError(_unusable(settings, error)) from error
        yield found


def serve(settings: ServiceSettings, *, on_ready: Callable[[str], None] = lambda url: None) -> None:
    """Answer requests until a signal ends the process; running executors then save and end.

    Args:
        on_ready: Called with the service's address once requests are answered.

    Raises:
        ServiceError: Other machines can reach the host and there are no keys; see also :func:`opened_service` and
            :func:`listening`.
    """
    configure_logs(as_json=settings.json_logs)
    with opened_service(settings) as service:
        with service.store.reading() as session:
            if not settings.is_loopback and not has_keys(session):
                raise ServiceError(
                    f"host: expected an address that only this machine can reach, such as 127.0.0.1, while there are "
                    f"no keys, found {settings.host}; create a key first with: alto keys create"
                )
        # Bind the port first: a server that cannot answer requests must not become the leader.
        with listening(settings) as sockets, running(service) as app:
            _Server(app, on_ready).run(sockets)


class _Server(uvicorn.Server):
    """A uvicorn server that reports when it answers requests."""

    def __init__(self, app: FastAPI, on_ready: Callable[[str], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=5,
                timeout_keep_alive=KEEP_ALIVE_S,
                server_header=False,
            )
        )
        self._app, self._on_ready = app, on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals by ending the server. Unlike uvicorn, do not raise the signal again afterwards, because
        executors must save first. A second signal has its usual effect."""
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

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the event streams and ask executors to save, then close all connections."""
        self._app.state.followers.end()
        await asyncio.to_thread(self._app.state.coordinator.begin_stop)
        await super().shutdown(sockets)


def _bound(host: str, port: int, opened: contextlib.ExitStack) -> list[socket.socket]:
    """Return a socket bound to each address of ``host`` ("localhost" has two); ``opened`` closes them."""
    found: list[socket.socket] = []
    refusal: OSError | None = None
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, address in dict.fromkeys(addresses):
        each = opened.enter_context(socket.socket(family, kind, protocol))
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # If any free port will do (port 0), all sockets use the port of the first.
        taken = found[0].getsockname()[1] if found else port
        try:
            each.bind((address[0], taken, *address[2:]))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            refusal = error  # a host name may have an address that this machine lacks
        else:
            found.append(each)
    if not found:
        raise refusal or OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    return found


def _unusable(settings: ServiceSettings, error: OSError) -> str:
    """Return an error message that says why the service cannot listen."""
    if error.errno == errno.EADDRINUSE:
        return (
            f"port: expected a free port, found that another program listens on {settings.port} of {settings.host}; "
            "choose another port, or end that program"
        )
    if error.errno == errno.EACCES:
        return (
            f"port: expected a port that this user may open, found {settings.port}; choose a different port, such as "
            "1024 or higher"
        )
    return (
        f"host: expected an address of this machine, found {settings.host!r} ({error.strerror}); choose another host, "
        "such as 127.0.0.1"
    )


class _Planes:
    """Opens one control plane after the other; each knows the machines of those before it."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._needs_gpus = False

    @contextlib.contextmanager
    def opened(self, epoch: int) -> Iterator[ControlPlane]:
        """Yield the control plane of the leader with this epoch.

        Raises:
            AltoError: The cluster cannot be reached, or has no GPUs although it had some since this process started.
        """
        settings = self._settings
        setup = QueueSetup(
            strategy=settings.strategy, cluster=settings.cluster, total_gpus=settings.total_gpus, quotas={}
        )
        folder, before = control_folder(settings.root, epoch), history_before(settings.root)
        with opened_control_plane(
            setup, folder, before=before, machines=settings.machines, needs_gpus=self._needs_gpus
        ) as plane:
            self._needs_gpus = plane.has_gpus
            yield plane
