"""The data of a task as a user can read it before training."""

from __future__ import annotations

import statistics
from itertools import groupby
from typing import Any

from torch import Tensor

from alto.data.encode import EncodedDataset
from alto.data.task_data import TaskRows
from alto.records import DataPreview, PreviewExample
from alto.spec import Task

__all__ = ["preview_rows"]


def preview_rows(rows: TaskRows, tokenizer: Any, task: Task, *, num_rows: int) -> DataPreview:
    """What ``rows`` become under ``tokenizer``, and the first ``num_rows`` training examples.

    Raises:
        DataError: See :meth:`TaskRows.encode`.
    """
    data = rows.encode(tokenizer)
    lengths = [ids.numel() for ids in data.train.input_ids]
    return DataPreview(
        dataset=task.dataset,
        model=task.model,
        form=rows.layout.form,
        columns=dict(rows.layout.columns),
        max_length=rows.max_length,
        counts=data.counts(),
        row_tokens=(min(lengths), statistics.median(lengths), max(lengths)),
        notes=data.notes,
        examples=tuple(_example(data.train, row, tokenizer) for row in range(min(num_rows, len(data.train)))),
    )


def _example(dataset: EncodedDataset, row: int, tokenizer: Any) -> PreviewExample:
    ids: list[int] = dataset.input_ids[row].tolist()
    trained = [False, *(_is_trained(dataset.targets[row])[:-1])]
    runs = groupby(zip(ids, trained, strict=True), key=lambda pair: pair[1])
    segments = tuple(
        (tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False), is_trained)
        for is_trained, run in runs
    )
    return PreviewExample(num_tokens=len(ids), segments=segments)


def _is_trained(targets: Tensor) -> list[bool]:
    """Of every position, whether the token behind it is trained."""
    marks: list[bool] = (targets >= 0).tolist()
    return marks
