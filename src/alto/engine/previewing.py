"""Previews the data of a task as it would be trained, without reading weights."""

from __future__ import annotations

from dataclasses import replace

from alto.backbone import build_skeleton, limits_of, load_config, load_tokenizer
from alto.data import HeadStore, preview_rows, read_task_rows
from alto.engine.start import with_start, with_targets
from alto.errors import DataError
from alto.evaluation import usable_rows
from alto.executor import model_notes
from alto.records import DataPreview
from alto.spec import Task

__all__ = ["preview_data", "preview_task", "with_model_notes"]


_NUM_READ = 500
"""Number of rows of a large dataset that are read for a preview."""


def preview_task(task: Task, *, num_rows: int) -> DataPreview:
    """Return the data of ``task``, its first ``num_rows`` examples, and notes on its model. Only the first rows of a
    large dataset are read; all of them if the first rows alone cause an error, because the whole dataset may not.

    Raises:
        AltoError: The data or the model's tokenizer has an error.
    """
    task = with_start(task)
    try:
        shown = preview_data(task, num_rows=num_rows, head=HeadStore(max(_NUM_READ, 2 * num_rows)))
    except DataError:
        shown = preview_data(task, num_rows=num_rows)
    return with_model_notes(shown, task)


def preview_data(task: Task, *, num_rows: int, head: HeadStore | None = None) -> DataPreview:
    """Return the data of ``task`` and its first ``num_rows`` examples.

    Args:
        head: Holds the first rows of large datasets; None tokenises all rows, which takes time.

    Raises:
        AltoError: The data or the model's tokenizer has an error.
    """
    rows = read_task_rows(task, head=head)
    if task.select_by != "metric":
        usable_rows(rows.validation, task.select_by)
    tokenizer = load_tokenizer(task.base_model)
    limits = limits_of(load_config(task.base_model))
    return preview_rows(rows, tokenizer, task, num_rows=num_rows, limits=limits, head=head)


def with_model_notes(shown: DataPreview, task: Task) -> DataPreview:
    """Return ``shown`` with notes on the settings and the model of ``task``."""
    task = with_targets(task)
    skeleton = build_skeleton(task.base_model)
    about_model = model_notes(skeleton, [job.config for job in task.jobs], task.method)
    return replace(shown, notes=(*task.notes, *shown.notes, *about_model))
