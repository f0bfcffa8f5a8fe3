"""Synchronisation of a vLLM server's adapters with the database: new models are registered, deleted ones removed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, and_, or_, select, update
from sqlalchemy.orm import Session

from alto.base import read_json
from alto.service.context import Service
from alto.service.ids import now
from alto.service.models import alias_name
from alto.service.store.jobs import add_event, lock_job
from alto.service.store.tables import AliasRow, JobRow, ModelRow
from alto.service.vllm.adapters import AdapterRefusedError, VllmServer
from alto.service.vllm.cache import CONFIG_FILE, AdapterCache
from alto.service.vllm.upstream import UpstreamError
from alto.spec import unserved_by_vllm


def move_alias(session: Session, model: ModelRow, job: JobRow) -> str | None:
    """Point the alias of a newly ready model to this model, unless it points to a newer one.

    Returns:
        The alias if it has moved, else None.
    """
    if not job.suffix:
        return None
    name = alias_name(model.base_model, model.tenant, job.suffix)
    alias = session.scalar(select(AliasRow).where(AliasRow.name == name).with_for_update())
    if alias is None:
        alias = AliasRow(
            name=name, tenant=model.tenant, base_model=model.base_model, suffix=job.suffix, created_at=now()
        )
        session.add(alias)
    else:
        present = session.scalar(select(ModelRow).where(ModelRow.id == alias.model, ModelRow.deleted_at.is_(None)))
        if present is not None and present.number >= model.number:
            return None
    alias.model, alias.moved_at = model.id, now()
    return name


def settle_aliases(session: Session) -> None:
    """Point aliases of deleted models to the newest ready model; if there is no such model, delete the alias."""
    statement = select(AliasRow).join(ModelRow, ModelRow.id == AliasRow.model).where(ModelRow.deleted_at.is_not(None))
    for alias in session.scalars(statement.with_for_update(of=AliasRow)).all():
        newest = session.scalar(
            select(ModelRow)
            .join(JobRow, JobRow.id == ModelRow.job)
            .where(
                ModelRow.tenant == alias.tenant,
                ModelRow.base_model == alias.base_model,
                JobRow.suffix == alias.suffix,
                ModelRow.serving == "ready",
                ModelRow.deleted_at.is_(None),
            )
            .order_by(ModelRow.number.desc())
            .limit(1)
        )
        if newest is None:
            session.delete(alias)
        else:
            alias.model, alias.moved_at = newest.id, now()


_LOG = logging.getLogger("alto.service.vllm")

_TURN_S = 0.5
_MOST_PAUSE_S = 3600.0
"""Longest pause before a failed model is tried again; the pause doubles from ``vllm.probe_interval_s``."""
_STOP_S = 5.0


class Registrar:
    """A thread that registers models with the vLLM server of the settings; does nothing without one.

    Its state is in the database and on the server, so two registrars at the same time do no harm.

    Args:
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, service: Service, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._clock = clock
        self._settings = service.settings.vllm
        self._server = None if self._settings is None else VllmServer(self._settings)
        folder = None if self._settings is None else self._settings.cache
        self._cache = None if folder is None else AdapterCache(Path(folder).resolve())
        self._has_pointed = False
        self._thread = threading.Thread(target=self._work, name="alto-registrar", daemon=True)
        self._is_stopping = threading.Event()
        self._lock = threading.Lock()
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None
        self._look_at = clock()
        self._rest_until = clock()
        self._retries: dict[int, tuple[int, float]] = {}
        """Consecutive failures of a model, and the time of its next try, by the model's number."""

    def start(self) -> None:
        """Start if there is a server; the first turn checks all models."""
        if self._server is not None:
            self._thread.start()

    def stop(self) -> None:
        """Stop soon, even while waiting for the server."""
        self._is_stopping.set()
        with self._lock:
            if self._running is not None:
                loop, task = self._running
                loop.call_soon_threadsafe(task.cancel)
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def turn(self) -> None:
        """Synchronise the server with the database if something has changed or a check is due.

        Raises:
            SQLAlchemyError: The database cannot be used.
        """
        if self._server is None or self._clock() < self._rest_until:
            return
        if self._clock() < self._look_at and not self._has_changes():
            return
        try:
            asyncio.run(self._reconcile(self._server))
        except UpstreamError as error:
            self._rest_until = self._clock() + self._interval_s
            _LOG.warning("adapters cannot be registered at the moment: %s", error)

    # -- one turn --------------------------------------------------------------------------------------------------

    async def _reconcile(self, server: VllmServer) -> None:
        if not self._begin():
            return
        try:
            served = await server.models()
            self._look_at = self._clock() + self._interval_s
            rows = self._rows(or_(ModelRow.deleted_at.is_(None), ModelRow.serving != "none"))
            if any(row.serving == "ready" and row.deleted_at is None and row.id not in served for row in rows):
                self._retries.clear()  # the server has restarted, perhaps with other options
            for row in rows:
                if row.deleted_at is None and self._is_due(row, served):
                    await self._register(server, row, served)
            with self._service.store.writing() as session:
                settle_aliases(session)
            await self._point(server)
            for row in rows:
                if row.deleted_at is not None:
                    await self._remove(server, row, served)
        finally:
            with self._lock:
                self._running = None

    def _begin(self) -> bool:
        """Let :meth:`stop` cancel the current task; return false if it was called already."""
        task = asyncio.current_task()
        assert task is not None
        with self._lock:
            self._running = (asyncio.get_running_loop(), task)
        return not self._is_stopping.is_set()

    def _has_changes(self) -> bool:
        rows = self._rows(
            or_(
                and_(
                    ModelRow.deleted_at.is_(None),
                    or_(ModelRow.serving == "pending", and_(ModelRow.serving == "none", _HAS_NO_DETAILS)),
                ),
                and_(ModelRow.deleted_at.is_not(None), ModelRow.serving != "none"),
            )
        )
        return any(not self._is_held_back(row) for row in rows)

    def _rows(self, condition: ColumnElement[bool]) -> list[ModelRow]:
        """Return models, newest first, because aliases wait for the newest model."""
        with self._service.store.reading() as session:
            return list(session.scalars(select(ModelRow).where(condition).order_by(ModelRow.number.desc())))

    def _is_due(self, row: ModelRow, served: Mapping[str, str]) -> bool:
        if not self._service.settings.is_served(row.base_model):
            if row.serving != "none" or row.serving_details is None:
                self._note(row, "none", f"the vLLM server has a different base model than {row.base_model}")
            return False
        return not (row.serving == "ready" and row.id in served) and not self._is_held_back(row)

    def _is_held_back(self, row: ModelRow) -> bool:
        return row.number in self._retries and self._clock() < self._retries[row.number][1]

    async def _register(self, server: VllmServer, row: ModelRow, served: Mapping[str, str]) -> None:
        if not self._note(row, "pending"):
            return
        try:
            if row.id not in served:
                folder = self._folder_of(row)
                _check_served(read_json(folder / CONFIG_FILE))
                if self._cache is None:
                    await server.load(row.id, folder)
                else:
                    self._cache.publish(row.id, folder, self._base_path(served))
            await server.probe(row.id)
        except UpstreamError as error:
            self._hold_back(row)
            self._note(row, "pending", self._shown(error))
            raise
        except Exception as error:  # refused, or any error of the artifact store: go on with the other models
            self._hold_back(row)
            merged = f"; the merged weights can be served instead: POST /api/models/{row.id}/merged"
            self._note(row, "failed", self._shown(error) + merged * isinstance(error, AdapterRefusedError))
            with contextlib.suppress(AdapterRefusedError):
                await server.unload(row.id)
            return
        self._retries.pop(row.number, None)
        self._note(row, "ready")

    def _base_path(self, served: Mapping[str, str]) -> str:
        """Return the path or hub id with which the server was started.

        Raises:
            UpstreamError: The server does not list it.
        """
        assert self._settings is not None
        path = served.get(self._settings.base_model)
        if not path:
            raise UpstreamError(
                f"expected the vLLM server to list its base model {self._settings.base_model} with its path (root), "
                f"found {', '.join(served)}; correct vllm.base_model"
            )
        return path

    async def _point(self, server: VllmServer) -> None:
        """Update the aliases of the cache from the database, and unload changed aliases, so that the server looks for
        them again."""
        if self._cache is None:
            return
        with self._service.store.reading() as session:
            rows = session.scalars(select(AliasRow)).all()
            aliases = {row.name: row.model for row in rows if self._service.settings.is_served(row.base_model)}
        changed = self._cache.point(aliases)
        if not self._has_pointed:  # an earlier process may have changed links and not told the server
            changed = list(dict.fromkeys([*changed, *aliases]))
        for alias in changed:
            with contextlib.suppress(AdapterRefusedError):
                await server.unload(alias)
        self._has_pointed = True

    async def _remove(self, server: VllmServer, row: ModelRow, served: Mapping[str, str]) -> None:
        if self._is_held_back(row):
            return
        if row.id in served:
            try:
                await server.unload(row.id)
            except AdapterRefusedError as error:
                self._hold_back(row)
                _LOG.warning("a deleted adapter is still served: %s", error)
                return
        shutil.rmtree(self._fetched(row), ignore_errors=True)
        if self._cache is not None:
            self._cache.remove(row.id)
        self._retries.pop(row.number, None)
        with self._service.store.writing() as session:
            session.execute(
                update(ModelRow).where(ModelRow.number == row.number).values(serving="none", serving_details=None)
            )

    def _hold_back(self, row: ModelRow) -> None:
        failures = self._retries.get(row.number, (0, 0.0))[0] + 1
        pause_s = min(_MOST_PAUSE_S, self._interval_s * 2.0 ** min(failures - 1, 30))
        self._retries[row.number] = (failures, self._clock() + pause_s)

    # -- the database and the disk ---------------------------------------------------------------------------------

    def _note(self, row: ModelRow, serving: str, details: str | None = None) -> bool:
        """Store a model's serving state; return false if it was deleted meanwhile. A ready model gets its alias too."""
        with self._service.store.writing() as session:
            job = lock_job(session, row.job)
            model = session.scalar(
                select(ModelRow)
                .where(ModelRow.number == row.number, ModelRow.deleted_at.is_(None))
                .with_for_update()
                .execution_options(populate_existing=True)
            )
            if model is None:
                return False
            model.serving, model.serving_details = serving, details
            if serving == "ready" and job is not None:
                alias = move_alias(session, model, job)
                if alias is not None:
                    add_event(session, job, f"Requests to {alias} are answered by {model.id} from now on")
        if serving != "pending":
            _LOG.info("adapter", extra={"model": row.id, "serving": serving, "details": details})
        return True

    def _folder_of(self, row: ModelRow) -> Path:
        """Return the adapter's folder on this machine, fetched if the artifacts are in a remote store.

        Raises:
            OSError: The folder does not exist.
        """
        folder = self._service.artefacts.local_folder(row.adapter)
        if folder is None:
            folder = self._fetched(row)
            if not folder.exists():
                self._service.artefacts.fetch_folder(row.adapter, folder)
        elif not folder.exists():
            raise FileNotFoundError("the adapter is no longer in the store of artefacts")
        return folder

    def _fetched(self, row: ModelRow) -> Path:
        return self._service.settings.root / "serving" / row.job

    def _shown(self, error: Exception) -> str:
        """Return the text of an error without this machine's paths."""
        text = str(error)
        folder = self._service.artefacts.local_folder("models")
        for path in (None if folder is None else folder.parent, self._service.settings.root):
            text = text if path is None else text.replace(f"{path}/", "")
        return text

    @property
    def _interval_s(self) -> float:
        assert self._settings is not None
        return self._settings.probe_interval_s

    # -- the thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._is_stopping.is_set():
            try:
                self.turn()
            except Exception as error:  # the thread must survive for the next turn
                self._rest_until = self._clock() + self._interval_s
                _LOG.error("adapters cannot be registered at the moment", exc_info=error)
            except asyncio.CancelledError:
                return
            self._is_stopping.wait(_TURN_S)


def _check_served(config: Mapping[str, Any]) -> None:
    """Check that vLLM can serve an adapter with this ``adapter_config.json``.

    Raises:
        AdapterRefusedError: vLLM cannot serve it.
    """
    settings = unserved_by_vllm(config)
    if settings:
        raise AdapterRefusedError(f"expected an adapter that vLLM can serve, found one with {' and '.join(settings)}")


_HAS_NO_DETAILS = ModelRow.serving_details.is_(None)


@contextlib.contextmanager
def registering(service: Service) -> Iterator[None]:
    """Run a registrar until the block is left."""
    registrar = Registrar(service)
    registrar.start()
    try:
        yield
    finally:
        registrar.stop()
