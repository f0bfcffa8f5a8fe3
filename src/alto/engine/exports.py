"""Finds the adapter to export: the best one of a run or of one of its jobs, or the one in a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from alto.artifacts import Rows, Winner
from alto.base import read_json
from alto.data import read_task_rows
from alto.engine.existing_runs import check_trained_on
from alto.errors import RunNotFoundError, SpecError
from alto.evaluation import adapter_folder, best_of_jobs, chat_template_beside
from alto.lora import SavedAdapter, read_saved_adapter
from alto.runs import METRICS_NAME, RunDir, load_run_task, read_history
from alto.spec import BaseModelSpec, Task, default_name, labels_beside


def find_winner(
    target: Path, *, job: str | None, base: str | None, trust_remote_code: bool, needs_rows: bool
) -> Winner:
    """Return the adapter that ``target`` names, with its base model.

    Args:
        target: A run directory (its best adapter is meant) or the folder of an adapter.
        job: Take the best adapter of this job of the run instead.
        base: The base model, if the name in the run or adapter does not find it.
        needs_rows: Whether to read the rows of the run's task to find out their columns and form.

    Raises:
        RunNotFoundError: There is no such adapter.
        RunError, UnsupportedError: See :func:`alto.lora.read_saved_adapter`.
        UntrustedCodeError: The run's task asks for code of the base model, and the caller does not allow it.
        RunChangedError: The run was trained on another base model, and ``base`` is not given.
        SpecError: Neither the adapter nor the caller names a base model.
        DataError: The rows of the task cannot be read.
    """
    if (target / "task.yaml").is_file():
        run = RunDir.open(target)
        folder = adapter_folder(target) if job is None else best_of_jobs(run, [job])[job]
        task = load_run_task(run, trust_remote_code=trust_remote_code, is_trained=False)
        return _of_run(run, task, read_saved_adapter(folder), job=job, base=base, needs_rows=needs_rows)
    if job is not None:
        raise RunNotFoundError(
            f"job: expected a run directory to look for the job {job} in, found no task.yaml in {target}; give the "
            "run, or the adapter without a job"
        )
    return _of_folder(read_saved_adapter(adapter_folder(target)), base=base, trust_remote_code=trust_remote_code)


def _of_run(
    run: RunDir, task: Task, adapter: SavedAdapter, *, job: str | None, base: str | None, needs_rows: bool
) -> Winner:
    spec = replace(task.base_model, id=base or task.model, torch_compile=False)
    if base is None:
        check_trained_on([run.root], spec)
    rows = None
    if needs_rows:
        layout = read_task_rows(task).layout
        rows = Rows(name=task.name, form=layout.form, columns=dict(layout.columns), of_messages=layout.of_messages)
    history = read_history(run.root)
    found = history.best if job is None else history.jobs.get(job)
    return Winner(
        name=task.name if job is None else f"{task.name}-{job}",
        adapter=adapter,
        base=spec,
        is_base_named=base is not None,
        named_labels=task.label_set if adapter.has_head else None,
        task=task,
        config=None if found is None else task.job_config(found.config),
        rows=rows,
        data={} if history.started is None else history.started.data,
    )


def _of_folder(adapter: SavedAdapter, *, base: str | None, trust_remote_code: bool) -> Winner:
    model = base or adapter.base_model
    if not model:
        raise SpecError(
            f"base: expected {adapter.config_file} to name the base model, found that it does not; name it with --base"
        )
    template = chat_template_beside({"adapter": adapter.folder})
    return Winner(
        name=default_name(adapter.folder),
        adapter=adapter,
        base=BaseModelSpec(id=model, trust_remote_code=trust_remote_code, chat_template=template),
        is_base_named=base is not None,
        named_labels=labels_beside(adapter.folder) if adapter.has_head else None,
        data=_rows_beside(adapter.folder),
    )


def _rows_beside(folder: Path) -> Mapping[str, Any]:
    """Return the form of the rows that an ALTO adapter was trained on; empty if its metrics file does not say."""
    try:
        found = read_json(folder / METRICS_NAME)
    except (OSError, ValueError):  # other programs write files of this name in their own formats
        return {}
    rows = found.get("rows") if isinstance(found, dict) else None
    return rows if isinstance(rows, dict) else {}
