"""Rows of one dataset, converted to what a method learns from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from alto.data.conversation import Row
from alto.data.convert import label_of, to_conversation, to_labelled, to_labelled_text, to_pair
from alto.data.faults import BadRows, FaultList
from alto.data.formats import Layout, find_layout
from alto.data.labels import LabelReader, find_labels
from alto.data.row_store import MEMORY, RowStore
from alto.data.rows import RawRow, RowError
from alto.errors import DataFormatError
from alto.spec.data_keys import DataKeys
from alto.spec.method import find_method, learns_from_pairs

__all__ = ["ConvertedRows", "convert_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedRows:
    """The rows of one dataset.

    Attributes:
        rows: The rows that can be used.
        layout: Their form and columns.
        unread_columns: Columns without a role, each with the number of rows that have a value there.
        bad: The rows that were left out; None if there are none.
        labels: Reader of the labels of texts; None if the rows are not labelled texts.
    """

    rows: Sequence[Row]
    layout: Layout
    unread_columns: Mapping[str, int]
    bad: BadRows | None
    labels: LabelReader | None = None


def convert_rows(
    rows: Sequence[RawRow],
    known_form: str,
    keys: DataKeys,
    method: str,
    *,
    key: str = "dataset",
    is_paired: bool | None = None,
    labels: LabelReader | None = None,
    store: RowStore = MEMORY,
) -> ConvertedRows:
    """Convert ``rows``; their form is the task's, or that of the dataset's preset if the task sets none.

    Args:
        rows: Rows of the dataset; they are read more than once.
        known_form: Form of the dataset's preset; ``auto`` if it has none.
        keys: Data keys of the task, or of one source of its mixture.
        key: The task's key that names the dataset, for messages.
        is_paired: Whether the rows have to be pairs. None accepts both kinds, and prefers the kind that the task's
            method needs.
        labels: The labels that texts may have; None allows all labels of the rows.

    Raises:
        BadRowsError: Rows cannot be used and bad rows are not skipped, or no row can be used.
        DataFormatError: See :func:`find_layout` and :func:`find_labels`; or the rows are not of the kind that the
            task's method learns from.
    """
    form = known_form if keys.dataset_format == "auto" and not keys.columns else keys.dataset_format
    faults = FaultList(key)
    if all(row.fault is not None for row in rows):
        for row in rows:
            assert row.fault is not None
            faults.add(row.where, row.fault)
        faults.settle(len(rows), keys.on_bad_row)
    entry = find_method(method).entry
    meant = learns_from_pairs(method) if is_paired is None else is_paired
    layout = find_layout(
        rows,
        form,
        keys.columns,
        is_paired=None if entry.is_labelled else meant,
        is_labelled=entry.is_labelled,
        is_classified=bool(entry.problem_types),
    )
    if not entry.is_labelled and is_paired is not None and layout.is_paired != is_paired:
        raise _wrong_kind(layout, method, key)
    if layout.is_classified and labels is None:
        values = [label_of(row, layout) for row in rows if row.fault is None]
        labels = find_labels(values, keys, entry.problem_types, key)
    unread = _UnreadColumns(layout)
    convert = _converter(layout, labels, is_labelled=entry.is_labelled)

    def convert_all() -> Iterator[Row]:
        for row in rows:
            unread.count(row)
            try:
                yield convert(row, layout)
            except RowError as error:
                faults.add_error(error)

    return ConvertedRows(
        rows=store.keep(convert_all()),
        layout=layout,
        unread_columns=unread.counts,
        bad=faults.settle(len(rows), keys.on_bad_row),
        labels=labels,
    )


def _converter(layout: Layout, labels: LabelReader | None, *, is_labelled: bool) -> Callable[[RawRow, Layout], Row]:
    if labels is not None:
        return partial(to_labelled_text, labels=labels)
    if layout.is_paired:
        return to_pair
    return to_labelled if is_labelled else to_conversation


class _UnreadColumns:
    """A counter of values in columns without a role.

    Attributes:
        counts: Number of rows with a value, by column, in the order in which columns first have one.
    """

    def __init__(self, layout: Layout) -> None:
        self._read = {column for _, column in layout.columns}
        self.counts: Counter[str] = Counter()

    def count(self, row: RawRow) -> None:
        empty: tuple[object, ...] = (None, "", [], {})
        self.counts.update(name for name, value in row.values.items() if name not in self._read and value not in empty)


def _wrong_kind(layout: Layout, method: str, key: str) -> DataFormatError:
    """Return the error for rows of the wrong kind, which the method's objective would find only with a loaded model."""
    if not layout.is_paired:
        return DataFormatError(
            f"{key}: expected preference pairs for method {method}, found rows with one reply ({layout}); write "
            "method: sft, or name the columns of the pairs with columns: {prompt: <its column>, chosen: <its column>, "
            "rejected: <its column>}"
        )
    chosen = layout.column("chosen")
    replies = "" if chosen is None else f"; or train on the chosen replies with columns: {{completion: {chosen}}}"
    return DataFormatError(
        f"{key}: expected rows with one reply for method {method}, found preference pairs ({layout}); learn from "
        f"them with method: dpo{replies}"
    )
