"""Objects that the API returns, with the fields and types that OpenAI's client reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import Query

from alto.service.store.tables import AliasRow, Checkpoint, FileRow, JobEvent, JobRow, ModelRow, PartRow, UploadRow

_WHOLE = frozenset({"batch_size", "n_epochs"})
_TYPED = ("n_epochs", "batch_size", "learning_rate_multiplier")
_ADDED = ("learning_rate", "r")


def list_object(data: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return a page, with the ids of its first and last object, as the client's models of pages have them."""
    return {
        "object": "list",
        "data": list(data),
        "has_more": has_more,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


def file_object(row: FileRow) -> dict[str, Any]:
    """Return the object of a file."""
    return {
        "id": row.id,
        "object": "file",
        "bytes": row.num_bytes,
        "created_at": row.created_at,
        "expires_at": row.expires_at,
        "filename": row.filename,
        "purpose": row.purpose,
        "status": row.status,
        "status_details": row.status_details,
    }


def upload_object(row: UploadRow, file: FileRow | None = None) -> dict[str, Any]:
    """Return the object of an upload, and of its file if given."""
    return {
        "id": row.id,
        "object": "upload",
        "bytes": row.num_bytes,
        "created_at": row.created_at,
        "expires_at": row.expires_at,
        "filename": row.filename,
        "purpose": row.purpose,
        "status": row.status,
        "file": None if file is None else file_object(file),
    }


def part_object(row: PartRow) -> dict[str, Any]:
    """Return the object of a part of an upload."""
    return {"id": row.id, "object": "upload.part", "created_at": row.created_at, "upload_id": row.upload}


def job_object(row: JobRow) -> dict[str, Any]:
    """Return the object of a fine-tuning job."""
    method = row.request.get("method") or {}
    kind = method.get("type", "supervised")
    given = (method.get(kind) or {}).get("hyperparameters") or row.request.get("hyperparameters") or {}
    chosen = (row.result or {}).get("hyperparameters", {})
    shown = _hyperparameters(given, chosen)
    extra = {key: value for key, value in given.items() if key not in (*_TYPED, "beta")}
    beta = {"beta": _number(given.get("beta", "auto"), chosen.get("beta"))} if kind == "dpo" else {}
    grader = (method.get(kind) or {}).get("grader")
    return {
        "id": row.id,
        "object": "fine_tuning.job",
        "created_at": row.created_at,
        "error": row.error,
        "estimated_finish": row.estimated_finish,
        "fine_tuned_model": row.fine_tuned_model,
        "finished_at": row.finished_at,
        "hyperparameters": shown,
        "integrations": row.request.get("integrations") or [],
        "metadata": row.pairs,
        "method": {
            "type": kind,
            kind: {**({} if grader is None else {"grader": grader}), "hyperparameters": {**extra, **shown, **beta}},
        },
        "model": row.model,
        "organization_id": row.tenant,
        "result_files": (row.result or {}).get("result_files", []),
        "seed": row.seed,
        "status": row.status,
        "trained_tokens": (row.result or {}).get("trained_tokens"),
        "training_file": row.training_file,
        "validation_file": row.validation_file,
    }


def event_object(row: JobEvent) -> dict[str, Any]:
    """Return the object of an event."""
    return {
        "id": f"ftevent-{row.job.partition('-')[2]}-{row.number}",
        "object": "fine_tuning.job.event",
        "created_at": row.created_at,
        "level": row.level,
        "message": row.message,
        "type": row.type,
        "data": row.data,
    }


def checkpoint_object(row: Checkpoint) -> dict[str, Any]:
    """Return the object of a checkpoint."""
    return {
        "id": row.id,
        "object": "fine_tuning.job.checkpoint",
        "created_at": row.created_at,
        "fine_tuned_model_checkpoint": row.model,
        "fine_tuning_job_id": row.job,
        "metrics": row.metrics,
        "step_number": row.step,
    }


def model_object(row: ModelRow) -> dict[str, Any]:
    """Return the object of a fine-tuned model."""
    return {"id": row.id, "object": "model", "created": row.created_at, "owned_by": row.tenant}


def alias_object(row: AliasRow) -> dict[str, Any]:
    """Return the object of an alias; ``root`` is the model that it points to now."""
    return {"id": row.name, "object": "model", "created": row.created_at, "owned_by": row.tenant, "root": row.model}


def base_model_object(name: str) -> dict[str, Any]:
    """Return the object of a base model."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "alto"}


def _hyperparameters(given: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the three hyperparameters of OpenAI's objects: the best configuration's value once it is known; else a
    number that was given; else ``auto``, which the client's type also has for a list. The best configuration's learning
    rate and rank are added."""
    typed = {key: _number(given.get(key, "auto"), chosen.get(key), is_whole=key in _WHOLE) for key in _TYPED}
    return typed | {key: chosen[key] for key in _ADDED if chosen.get(key) is not None}


def _number(given: object, chosen: object, *, is_whole: bool = False) -> Any:
    """Return a number or ``auto``. The client's types of epochs and batch sizes are int, so whole values become int."""
    value = chosen if chosen is not None else given
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "auto"
    return int(value) if is_whole and value == int(value) else float(value)


After = Annotated[str | None, Query(max_length=200, description="id of the last object of the previous page")]
Limit = Annotated[int, Query(ge=1, le=100, description="maximum number of objects per page")]
