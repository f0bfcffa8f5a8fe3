"""Finds the methods that can learn from a dataset, before there is a task for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from alto.data.convert import label_of, methods_of_labels
from alto.data.dataset import RowStore
from alto.data.formats import Layout, find_layout
from alto.data.rows import Item, RawRow
from alto.data.source import open_source
from alto.errors import DataFormatError
from alto.records import DataSurvey
from alto.spec import Task, find_method

_NUM_READ = 500
"""Number of rows at the start of a dataset that show its form."""


class _CountingStore(RowStore):
    """A store that keeps the first rows of a file, and only counts the others."""

    def __init__(self) -> None:
        self.num_left = 0

    def keep(self, rows: Iterable[Item]) -> Sequence[Item]:
        left = iter(rows)
        kept = list(itertools.islice(left, _NUM_READ))
        self.num_left += sum(1 for _ in left)
        return kept


def survey_rows(task: Task) -> DataSurvey:
    """Read the dataset of ``task`` and find all methods that can learn from its rows; the task's method is ignored.

    The task's ``columns`` and ``dataset_format`` apply. Pairs are for ``dpo``; ``orpo``, ``cpo`` and ``kto`` could
    learn from them too.

    Raises:
        DataError: See :func:`alto.data.source.open_source`, :func:`alto.data.files.read_file`.
    """
    source, store = open_source(task.dataset_name, "dataset", task), _CountingStore()
    splits = source.read(store)
    first = [splits.train[index] for index in range(min(len(splits.train), _NUM_READ))]
    rows = [row for row in first if row.fault is None]
    form = source.form if task.dataset_format == "auto" and not task.columns else task.dataset_format
    layouts = {method: layout for method in ("dpo", "kto", "sft") if (layout := _layout(method, rows, form, task))}
    labelled = _layout("classification", rows, form, task)
    if labelled is not None:
        names = methods_of_labels([label_of(row, labelled) for row in rows])
        # Every row of labelled replies or texts can be read as a reply, too, so that comes last.
        others = {method: layouts.pop(method) for method in ("sft",) if method in layouts}
        layouts = {**layouts, **dict.fromkeys(names, labelled), **others}
    return DataSurvey(
        num_rows=len(splits.train) + store.num_left,
        columns=tuple(rows[0].values) if rows else (),
        methods={method: str(layout) for method, layout in layouts.items()},
        has_validation=splits.validation is not None,
        has_test=splits.test is not None,
    )


def _layout(method: str, rows: Sequence[RawRow], form: str, task: Task) -> Layout | None:
    """Return the layout that ``method`` reads; None if it cannot learn from the rows."""
    if not rows:
        return None
    entry = find_method(method).entry
    try:
        layout = find_layout(
            rows,
            form,
            task.columns,
            is_paired=None if entry.is_labelled else entry.is_paired,
            is_labelled=entry.is_labelled,
            is_classified=bool(entry.problem_types),
        )
    except DataFormatError:
        return None
    if entry.is_labelled:
        are_marks = all(label_of(row, layout) in (0, 1) for row in rows)
        return layout if layout.is_labelled and are_marks else None
    return layout if layout.is_paired == bool(entry.is_paired) else None
