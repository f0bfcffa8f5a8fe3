"""The run folder of a job: its task, and copies of its files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from alto.engine.control_plane import checked_task
from alto.runs import RunDir
from alto.service.context import Service
from alto.service.ids import new_id
from alto.service.openai.files import artefact_of, find_file
from alto.service.store.tables import JobRow
from alto.spec import Task

__all__ = ["make_run", "shown_error"]

_TRAIN, _VALIDATION = "training.jsonl", "validation.jsonl"


def make_run(service: Service, job: JobRow) -> None:
    """Make the run folder of a job, checked and complete, or leave none; one that is there already stays.

    Raises:
        AltoError: What is wrong with its rows, or its base model.
        ApiError: A file was deleted meanwhile.
    """
    root = service.run_of(job)
    if (root / "task.yaml").exists():
        return
    unborn = root.with_name(f".{root.name}.{new_id('new')}")
    try:
        values: dict[str, Any] = dict(job.task)
        for file, name, key in (
            (job.training_file, _TRAIN, "dataset"),
            (job.validation_file, _VALIDATION, "validation_dataset"),
        ):
            if file is not None:
                with service.store.reading() as session:
                    row = find_file(session, job.tenant, file, key)
                service.artefacts.fetch(artefact_of(row), unborn / "data" / name)
                values[key] = str(unborn / "data" / name)
        task = checked_task(Task(**values, name=job.id, tenant=job.tenant, report_to="none"))
        moved = {
            key: str(root / "data" / Path(str(getattr(task, key))).name)
            for key in ("dataset", "validation_dataset")
            if getattr(task, key) is not None
        }
        folder = RunDir(unborn)
        folder.journal_file.touch()
        # Last, as a folder with it is complete.
        folder.task_file.write_text(task.replace(**moved).to_yaml(), encoding="utf-8")
        root.parent.mkdir(parents=True, exist_ok=True)
        unborn.rename(root)
    finally:
        shutil.rmtree(unborn, ignore_errors=True)


def shown_error(service: Service, job: JobRow, text: str) -> str:
    """The text of an error without the paths of this machine."""
    root = service.run_of(job)
    for found in sorted({part.strip("'\"(),;:") for part in text.split() if root.name in part}, key=len, reverse=True):
        if "/" in found:
            text = text.replace(found, Path(found).name)
    return text.replace(str(service.settings.root), "")
