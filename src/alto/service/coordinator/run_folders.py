"""The run folder of a job: its task and copies of its files."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from sqlalchemy import select

from alto.base import replace_file, writing
from alto.engine.runner import checked_task
from alto.runs import RunDir, load_run_task
from alto.service.context import Service
from alto.service.errors import refused
from alto.service.ids import new_id
from alto.service.openai.files import artefact_of, find_file
from alto.service.store.jobs import ENDED
from alto.service.store.tables import JobRow
from alto.spec import Task

_TRAIN, _VALIDATION = "training.jsonl", "validation.jsonl"
_ROWS = "data"
_ONLY_FOR_TRAINING = (_ROWS, "jobs", "control", "report.html")
"""Parts of a run folder that only training needs: rows, checkpoints of every job, commands, and a page that can be
rendered again."""


def make_run(service: Service, job: JobRow) -> None:
    """Make a complete and checked run folder for a job, or none at all; an existing one stays.

    Raises:
        AltoError: The rows or the base model cannot be used.
        ApiError: A file was deleted meanwhile, or its content is missing.
        OSError: The artifact store or a disk failed.
    """
    root = service.run_of(job)
    if (root / "task.yaml").exists():
        return
    partial = root.with_name(f".{root.name}.{new_id('new')}")
    try:
        values: dict[str, Any] = dict(job.task)
        for file, name, key, param in (
            (job.training_file, _TRAIN, "dataset", "training_file"),
            (job.validation_file, _VALIDATION, "validation_dataset", "validation_file"),
        ):
            if file is not None:
                _fetch_rows(service, job.tenant, file, param, partial / _ROWS / name)
                values[key] = str(partial / _ROWS / name)
        # All checkpoints are kept, because users may resume any job while the task runs; they are removed when it ends.
        task = checked_task(Task(**values, name=job.id, tenant=job.tenant, report_to="none", keep="all"))
        folder = RunDir(partial)
        folder.journal_file.touch()
        # Written last: a folder with this file is complete.
        folder.task_file.write_text(_with_rows_in(root, task).to_yaml(), encoding="utf-8")
        root.parent.mkdir(parents=True, exist_ok=True)
        partial.rename(root)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fetch_rows(service: Service, tenant: str, file: str, param: str, to: Path) -> None:
    with service.store.reading() as session:
        name = artefact_of(find_file(session, tenant, file, param))
    try:
        service.artefacts.fetch(name, to)
    except FileNotFoundError:
        folder = service.artefacts.local_folder("files")
        if folder is not None and not folder.is_dir():  # the disk is not mounted, so the file may still exist
            raise OSError(
                errno.ENODEV, "expected the folder of stored files, found none; is its disk mounted?"
            ) from None
        raise refused(
            f"{param}: expected the content of {file}, found that it is gone from the store of artefacts; upload the "
            "file again, and create the job with it",
            param,
            "file_content_missing",
        ) from None


def settled_task(service: Service, job: JobRow) -> Task:
    """Return a run's task with the rows in its own folder; update the task file if the folder was moved or restored.

    Raises:
        AltoError: The task file cannot be read or written.
    """
    run = RunDir.open(service.run_of(job))
    task = load_run_task(run, trust_remote_code=True)
    settled = _with_rows_in(run.root, task)
    if settled != task:
        with writing(run.root, run.task_file):
            replace_file(run.task_file, settled.to_yaml())
    return settled


def clear_ended_runs(service: Service, live: Collection[str]) -> None:
    """Delete what only training needs from the run folders of ended jobs, such as rows and checkpoints. Journals stay.

    Args:
        live: Jobs that executors may still work on.
    """
    found = {path.parent.name: path.parent for path in (service.settings.root / "runs").glob(f"*/*/{_ROWS}")}
    candidates = [job for job in found if job not in live]
    with service.store.reading() as session:
        for at in range(0, len(candidates), 500):
            some = candidates[at : at + 500]
            ended = session.scalars(select(JobRow.id).where(JobRow.id.in_(some), JobRow.status.in_(ENDED)))
            for job in ended:
                # The rows go last: a folder that still has them is cleaned again next time.
                for name in reversed(_ONLY_FOR_TRAINING):
                    path = found[job] / name
                    if path.is_dir():
                        shutil.rmtree(path)
                    else:
                        path.unlink(missing_ok=True)


def _with_rows_in(root: Path, task: Task) -> Task:
    """Return ``task`` with its row files in the run folder ``root``."""
    paths = {key: getattr(task, key) for key in ("dataset", "validation_dataset")}
    return task.replace(**{key: str(root / _ROWS / Path(str(path)).name) for key, path in paths.items() if path})


def shown_error(service: Service, job: JobRow, text: str) -> str:
    """Return the text of an error without the paths of this machine."""
    root = service.run_of(job)
    for found in sorted({part.strip("'\"(),;:") for part in text.split() if root.name in part}, key=len, reverse=True):
        if "/" in found:
            text = text.replace(found, Path(found).name)
    return text.replace(str(service.settings.root), "")
