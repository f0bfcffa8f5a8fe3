"""The data of a task as it would be trained, without weights."""

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
"""Rows of a large dataset that are read for a preview."""


def preview_task(task: Task, *, num_rows: int) -> DataPreview:
    """The data of ``task``, its first ``num_rows`` examples, and what is to be known of its model. Of large data only
    the first rows are read; but all of them where these alone are an error, which others may not be.

    Raises:
        AltoError: What is wrong with the data, or with the model's tokenizer.
    """
    task = with_start(task)
    try:
        shown = preview_data(task, num_rows=num_rows, head=HeadStore(max(_NUM_READ, 2 * num_rows)))
    except DataError:
        shown = preview_data(task, num_rows=num_rows)
    return with_model_notes(shown, task)


def preview_data(task: Task, *, num_rows: int, head: HeadStore | None = None) -> DataPreview:
    """The data of ``task`` and its first ``num_rows`` examples.

    Args:
        head: Takes the first rows of large data; None tokenises all rows, which takes time.

    Raises:
        AltoError: What is wrong with the data, or with the model's tokenizer.
    """
    rows = read_task_rows(task, head=head)
    if task.select_by != "metric":
        usable_rows(rows.validation, task.select_by)
    tokenizer = load_tokenizer(task.base_model)
    limits = limits_of(load_config(task.base_model))
    return preview_rows(rows, tokenizer, task, num_rows=num_rows, limits=limits, head=head)


def with_model_notes(shown: DataPreview, task: Task) -> DataPreview:
    """``shown`` with what is to be known of the settings and the model of ``task``."""
    task = with_targets(task)
    skeleton = build_skeleton(task.base_model)
    about_model = model_notes(skeleton, [job.config for job in task.jobs], task.method)
    return replace(shown, notes=(*task.notes, *shown.notes, *about_model))
