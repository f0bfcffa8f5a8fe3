"""``/api/drafts``: what a request for a task would do, shown before it is sent."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from alto.engine.runner import portable
from alto.errors import AltoError
from alto.records.data import PreviewExample
from alto.service.access import Caller
from alto.service.context import Service, ServiceOf
from alto.service.coordinator.leadership import code_of
from alto.service.errors import refused
from alto.service.openai.files import artefact_of, find_file
from alto.service.openai.jobs import JobRequest, check_usable, draft_of, serving_notes
from alto.service.openai.translation import build, worded_note
from alto.service.store.tables import FileRow
from alto.service.web.access import Reader
from alto.service.web.bodies import BodyRoute
from alto.spec import Task

_MOST_BYTES = 32 * 2**20
"""Maximum size of a file in a draft."""

router = APIRouter(prefix="/drafts", route_class=BodyRoute)


@router.post("")
def draft(
    request: Request,
    service: ServiceOf,
    caller: Reader,
    body: JobRequest,
    num_rows: Annotated[int, Query(ge=0, le=20)] = 3,
) -> dict[str, Any]:
    """Return the configurations of a request, their expected duration, and its first rows as the model sees them.

    Nothing is stored. Files that are too large to be read at once are refused.
    """
    values = draft_of(service, body)
    with tempfile.TemporaryDirectory(prefix="alto-draft-") as folder:
        files = _files(service, caller, body)
        paths = {key: str(_fetched(service, row, Path(folder) / f"{key}.jsonl")) for key, row in files.items()}
        task = build({**values, **paths, "name": "draft", "tenant": caller.tenant, "report_to": "none"})
        found: dict[str, Any] = {
            "object": "draft",
            "method": task.method,
            "num_jobs": len(task.jobs),
            "is_open_ended": task.search.learns,
            "num_gpus": task.num_gpus,
            "jobs": [dict(job.config.to_dict()) for job in task.jobs[:20]],
            "varying": sorted(_varying(task)),
            "estimate": _estimate(request, task),
            "notes": serving_notes(service, body.model, task),
        }
        if num_rows:
            found["rows"] = _rows(service, task, [row.sha256 for row in files.values()], num_rows)
    return found


def _files(service: Service, caller: Caller, body: JobRequest) -> dict[str, FileRow]:
    """Return the files of a request, by the keys of their task."""
    found = {}
    for file, param, key in (
        (body.training_file, "training_file", "dataset"),
        (body.validation_file, "validation_file", "validation_dataset"),
    ):
        if file is None:
            continue
        with service.store.reading() as session:
            check_usable(session, caller.tenant, file, param)
            row = find_file(session, caller.tenant, file, param)
        if row.num_bytes > _MOST_BYTES:
            raise refused(
                f"{param}: expected a file of at most {_MOST_BYTES // 2**20} MiB for a preview, found {row.num_bytes} "
                "bytes; send the task without a preview",
                param,
                "file_too_large_for_draft",
            )
        found[key] = row
    return found


def _fetched(service: Service, row: FileRow, path: Path) -> Path:
    service.artefacts.fetch(artefact_of(row), path)
    return path


def _varying(task: Task) -> set[str]:
    first, *others = (job.config.to_dict() for job in task.jobs)
    return {key for config in others for key, value in config.items() if value != first.get(key)}


def _estimate(request: Request, task: Task) -> dict[str, Any] | None:
    """Return the measured duration of such a task of the tenant; None if there is none, or another server leads."""
    coordinator = request.app.state.coordinator
    plane = None if coordinator is None else coordinator.plane
    found = None if plane is None else plane.estimate(portable(task))
    if found is None:
        return None
    return {"duration_s": found.duration_s, "device_hours": found.duration_s * task.num_gpus / 3600}


def _rows(service: Service, task: Task, files: list[str], num_rows: int) -> dict[str, Any]:
    try:
        shown = service.previews.preview(task, files, num_rows=num_rows)
    except AltoError as error:
        code, param = code_of(error, "invalid_value")
        raise refused(str(error).replace(str(Path(str(task.dataset)).parent), ""), param, code) from None
    return {
        "form": shown.form,
        "counts": dict(shown.counts),
        "row_tokens": list(shown.row_tokens),
        "notes": [worded_note(note) for note in shown.notes],
        "examples": [_example(example) for example in shown.examples],
    }


def _example(example: PreviewExample) -> dict[str, Any]:
    return {
        "num_tokens": example.num_tokens,
        "label": example.label,
        **{
            name: [{"text": text, "is_trained": is_trained} for text, is_trained in getattr(example, name)]
            for name in ("segments", "chosen", "rejected")
        },
    }
