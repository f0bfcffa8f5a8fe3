"""``/api/models``: fine-tuned models with their adapters, merged weights and serving state."""

from __future__ import annotations

import io
import json
import logging
import queue
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Select, select

from alto.engine import Engine
from alto.errors import AltoError
from alto.service.access import Caller
from alto.service.context import Service, ServiceOf
from alto.service.coordinator.run_folders import shown_error
from alto.service.errors import ApiError, not_found, refused
from alto.service.files.artefacts import zip_chunks
from alto.service.models import aliases_of, find_alias, find_model, merged_folder
from alto.service.openai.objects import After, Limit, list_object
from alto.service.store.jobs import add_event, lock_job, page_of
from alto.service.store.tables import FileRow, JobRow, ModelRow
from alto.service.vllm.chat import serve_command
from alto.service.web.access import Reader, Writer

_CONFIG = "adapter_config.json"
_CARD = "README.md"
_TEXTS = frozenset({_CONFIG, _CARD, "config.json"})


def texts_without_paths(service: Service, model: ModelRow, folder: str, names: Iterable[str]) -> dict[str, bytes]:
    """Return new contents, by name, for the stored files that contain paths of this machine.

    The base model gets its name in this service; the card says that this name is to be replaced. The stored files stay
    unchanged, because merged weights and vLLM need these paths.

    Args:
        names: Names of the files, relative to ``folder``.
    """
    with service.artefacts.open(f"{model.adapter}/{_CONFIG}") as file:
        named = json.load(file).get("base_model_name_or_path") or ""
    found = {named, service.settings.models.get(model.base_model, "")}
    paths = sorted((text for text in found if _is_path(text)), key=len, reverse=True)
    texts: dict[str, bytes] = {}
    for name in _TEXTS.intersection(names):
        with service.artefacts.open(f"{folder}/{name}") as file:
            text = file.read().decode()
        for path in paths:
            # As written in plain text, and as escaped in JSON.
            for form in (path, json.dumps(path)[1:-1]):
                text = text.replace(form, model.base_model)
        if name == _CARD:
            text = _public_card(service, model, text)
            text = _with_named_base(model, text) if paths else text
        texts[name] = text.encode()
    return texts


def _public_card(service: Service, model: ModelRow, text: str) -> str:
    """Return a card without folders of the service, and with the name of the uploaded rows."""
    text = re.sub(rf"{re.escape(str(service.settings.root))}[^\s`'\"]*/", "", text)
    with service.store.reading() as session:
        statement = select(FileRow.filename).join(JobRow, JobRow.training_file == FileRow.id)
        filename = session.scalar(statement.where(JobRow.id == model.job))
    return text.replace("`training.jsonl`", f"`{filename.replace('`', '')}`", 1) if filename else text


def _with_named_base(model: ModelRow, text: str) -> str:
    """Return a card that says how to replace the service's name for the base model. The header lists models of the
    hub, so it is without this name."""
    name = re.escape(model.base_model)
    text = re.sub(rf'^(base_model: "{name}"|- "base_model:adapter:{name}")\n', "", text, flags=re.MULTILINE)
    note = (
        f"`{model.base_model}` is the name of the base model in the service. In the code below and in `{_CONFIG}`, "
        "replace it by the hub id or the folder of the same model.\n\n"
    )
    return text.replace("```python\n", f"{note}```python\n", 1)


def _is_path(text: str) -> bool:
    """Return whether ``text`` is a folder, and neither a shipped name nor a hub id."""
    return "/" in text and (text.startswith(("/", "~", ".")) or Path(text).is_dir())


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
        """Queue writing the base model merged with the adapter of ``model`` to the artifacts; do nothing if it is
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


router = APIRouter(prefix="/models")


def _exports(request: Request) -> ModelExports:
    found: ModelExports = request.app.state.model_exports
    return found


Exports = Annotated[ModelExports, Depends(_exports)]


class _Push(BaseModel):
    model_config = ConfigDict(extra="forbid")

    repository: str = Field(max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")


@router.get("")
def list_(service: ServiceOf, caller: Reader, after: After = None, limit: Limit = 20) -> dict[str, Any]:
    """List the tenant's fine-tuned models, newest first."""
    with service.store.reading() as session:
        statement: Select[Any] = select(ModelRow).where(ModelRow.tenant == caller.tenant, ModelRow.deleted_at.is_(None))
        number = None
        if after is not None:
            number = session.scalar(
                select(ModelRow.number).where(ModelRow.id == after, ModelRow.tenant == caller.tenant)
            )
            if number is None:
                raise not_found("model", after, "after")
        rows: list[ModelRow]
        rows, has_more = page_of(session, statement, ModelRow.number, after=number, limit=limit)
        aliases = [(model.id, alias.name) for alias, model in aliases_of(session, caller.tenant)]
    return list_object([_object(service, row, aliases) for row in rows], has_more=has_more)


@router.get("/{model:path}/adapter")
def adapter(service: ServiceOf, caller: Reader, model: str) -> StreamingResponse:
    """Download the adapter's folder as a zip file."""
    row = _model_row(service, caller, model)
    names = service.artefacts.names(row.adapter)
    if not names:
        raise not_found("adapter", model, "model")
    return _zip(service, row, row.adapter, names, f"{row.job}.zip")


@router.post("/{model:path}/merged", status_code=202)
def merge(service: ServiceOf, caller: Writer, exports: Exports, model: str) -> dict[str, Any]:
    """Start writing merged weights; an event of the job reports when they are ready."""
    row = _model_row(service, caller, model)
    if not exports.merged_names(row):
        exports.merge(row)
    return {"id": row.id, "object": "model.merged", "status": _merged_status(exports, row)}


@router.get("/{model:path}/merged")
def merged(service: ServiceOf, caller: Reader, exports: Exports, model: str) -> StreamingResponse:
    """Download the merged weights as a zip file."""
    row = _model_row(service, caller, model)
    names = exports.merged_names(row)
    if not names:
        state = "weights that are still being written" if exports.is_merging(row) else "none"
        raise ApiError(
            404,
            f"model: expected merged weights, found {state}; request them with POST "
            f"/api/models/{row.id}/merged, and wait for the event of {row.job}",
            param="model",
            code="merged_not_found",
        )
    return _zip(service, row, merged_folder(row), names, f"{row.job}-merged.zip")


@router.post("/{model:path}/push", status_code=202)
def push(service: ServiceOf, caller: Writer, exports: Exports, model: str, body: _Push) -> dict[str, Any]:
    """Start uploading the adapter to the Hugging Face hub; an event of the job reports the result."""
    if not service.settings.hub_push:
        raise refused(
            "push: expected a service that uploads to the hub, found a service that does not (setting hub_push); "
            f"download the adapter from /api/models/{model[:300]}/adapter and upload it with: hf upload",
            code="hub_push_disabled",
        )
    row = _model_row(service, caller, model)
    exports.push(row, body.repository)
    return {"id": row.id, "object": "model.push", "repository": body.repository, "status": "running"}


@router.get("/{model:path}")
def get(service: ServiceOf, caller: Reader, exports: Exports, model: str) -> dict[str, Any]:
    """Return a fine-tuned model."""
    row = _model_row(service, caller, model)
    with service.store.reading() as session:
        aliases = [(found.id, alias.name) for alias, found in aliases_of(session, caller.tenant)]
        command = serve_command(service, session, row)
    return {**_object(service, row, aliases), "merged": _merged_status(exports, row), "serve_command": command}


def _model_row(service: Service, caller: Caller, model: str) -> ModelRow:
    """Return the model of that name, or the model that an alias of that name points to."""
    with service.store.reading() as session:
        alias = find_alias(session, caller.tenant, model)
        return alias[1] if alias is not None else find_model(session, caller.tenant, model)


def _object(service: Service, row: ModelRow, aliases: Iterable[tuple[str, str]]) -> dict[str, Any]:
    return {
        "id": row.id,
        "object": "model",
        "created_at": row.created_at,
        "job": row.job,
        "base_model": row.base_model,
        "aliases": [name for model, name in aliases if model == row.id],
        "serving": row.serving,
        "serving_details": row.serving_details,
        "ready": row.serving == "ready" and service.settings.vllm is not None,
    }


def _merged_status(exports: ModelExports, row: ModelRow) -> str:
    if exports.merged_names(row):
        return "ready"
    return "running" if exports.is_merging(row) else "none"


def _zip(service: Service, row: ModelRow, folder: str, names: list[str], filename: str) -> StreamingResponse:
    texts = texts_without_paths(service, row, folder, names)
    return StreamingResponse(
        zip_chunks(service.artefacts, folder, names, texts),
        media_type="application/zip",
        headers={"Content-Disposition": f'attachment; filename="{filename}"'},
    )
