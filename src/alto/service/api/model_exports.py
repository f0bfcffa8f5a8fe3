"""Long-running exports of fine-tuned models: merged weights, and uploads to the Hugging Face hub."""

from __future__ import annotations

import io
import logging
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select

from alto.engine import Engine
from alto.errors import AltoError
from alto.service.context import Service
from alto.service.coordinator.run_folders import shown_error
from alto.service.errors import ApiError
from alto.service.models import merged_folder
from alto.service.store.events import add_event
from alto.service.store.jobs import lock_job
from alto.service.store.tables import JobRow, ModelRow

__all__ = ["ModelExports"]

_LOG = logging.getLogger("alto.service.exports")

_MOST_WAITING = 16
_MARK = ".complete"
"""Name of the file that marks merged weights as complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    key: str
    model: ModelRow
    what: str
    carry_out: Callable[[ModelRow], str]
    """Function that does the export and returns a sentence for users."""


class ModelExports:
    """A queue that exports models one at a time on its own thread; an event of the job reports each result."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._orders: queue.Queue[_Order] = queue.Queue(_MOST_WAITING)
        self._open: set[str] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def merge(self, model: ModelRow) -> None:
        """Queue writing the base model merged with the adapter of ``model`` to the artefacts; do nothing if it is
        already queued.

        Raises:
            ApiError: Too many exports wait.
        """
        self._submit(
            _Order(key=f"merged {model.id}", model=model, what="merged weights to be written", carry_out=self._merge)
        )

    def push(self, model: ModelRow, repository: str) -> None:
        """Queue uploading the adapter of ``model`` to a repository of the Hugging Face hub.

        Raises:
            ApiError: Too many exports wait.
        """
        self._submit(
            _Order(
                key=f"push {model.id} {repository}",
                model=model,
                what=f"the adapter to be uploaded to {repository}",
                carry_out=lambda found: self._push(found, repository),
            )
        )

    def is_merging(self, model: ModelRow) -> bool:
        """Return whether merged weights of a model are queued or being written by this process."""
        with self._lock:
            return f"merged {model.id}" in self._open

    def merged_names(self, model: ModelRow) -> list[str]:
        """Return the files of a model's merged weights; none until all are written."""
        names = self._service.artefacts.names(merged_folder(model))
        return [name for name in names if name != _MARK] if _MARK in names else []

    def _submit(self, order: _Order) -> None:
        with self._lock:
            if order.key in self._open:
                return
            try:
                self._orders.put_nowait(order)
            except queue.Full:
                raise ApiError(
                    429,
                    f"expected at most {_MOST_WAITING} waiting exports, found more; try again later",
                    code="too_many_exports",
                    headers={"Retry-After": "60", "x-should-retry": "false"},
                ) from None
            self._open.add(order.key)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="alto-exports", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            order = self._orders.get()
            try:
                self._carry_out(order)
            except Exception:  # the thread must survive for the next order
                _LOG.exception("an export failed")
            finally:
                with self._lock:
                    self._open.discard(order.key)

    def _carry_out(self, order: _Order) -> None:
        try:
            message, level = order.carry_out(order.model), "info"
        except AltoError as error:
            with self._service.store.reading() as session:
                job = session.scalar(select(JobRow).where(JobRow.id == order.model.job))
            assert job is not None, "rows of jobs stay"
            cause = shown_error(self._service, job, str(error))
            message, level = f"Expected {order.what}, found: {cause}", "error"
        except Exception as error:
            self._note(order.model, f"Expected {order.what}, found {type(error).__name__}; see the log", "error")
            raise
        self._note(order.model, message, level)

    def _note(self, model: ModelRow, message: str, level: str) -> None:
        with self._service.store.writing() as session:
            job = lock_job(session, model.job)
            if job is not None:
                add_event(session, job, message, level=level)

    # -- what is done ----------------------------------------------------------------------------------------------

    def _merge(self, model: ModelRow) -> str:
        artefacts, name = self._service.artefacts, merged_folder(model)
        with self._workspace(model) as (adapter, folder):
            Engine().export(adapter, folder, merged=True, trust_remote_code=self._trusts(model))
            artefacts.delete(name)
            artefacts.write_folder(name, folder)
        artefacts.write(f"{name}/{_MARK}", io.BytesIO())
        with self._service.store.reading() as session:
            is_there = session.scalar(
                select(ModelRow.id).where(ModelRow.number == model.number, ModelRow.deleted_at.is_(None))
            )
        if is_there is None:
            artefacts.delete(name)
            return f"Merged weights of {model.id} were removed with the model"
        return f"Merged weights of {model.id} can be downloaded: /api/models/{model.id}/merged"

    def _push(self, model: ModelRow, repository: str) -> str:
        with self._workspace(model) as (adapter, folder):
            result = Engine().export(adapter, folder, push_to_hub=repository, trust_remote_code=self._trusts(model))
        return f"The adapter of {model.id} was uploaded to {result.url}"

    def _trusts(self, model: ModelRow) -> bool:
        return model.base_model in self._service.settings.trust_remote_code

    @contextmanager
    def _workspace(self, model: ModelRow) -> Iterator[tuple[Path, Path]]:
        """Yield a local folder with the adapter of a model, and a path that does not exist yet. Both are named after
        the job, and deleted after the block."""
        root = self._service.settings.root / "exports"
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=f"{model.job}-") as parent:
            adapter = Path(parent) / model.job
            self._service.artefacts.fetch_folder(model.adapter, adapter)
            yield adapter, Path(parent) / f"{model.job}-export"
