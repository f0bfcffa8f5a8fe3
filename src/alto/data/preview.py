"""Shows the first rows of a task as the model sees them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import groupby, takewhile
from typing import Any

from alto.data.dataset import EncodedDataset, HeadStore
from alto.data.reading import CachedRows
from alto.data.task_data import reading_notes
from alto.data.tokenize import TaskRows
from alto.records import DataPreview, ModelLimits, PreviewExample, Segments
from alto.spec import Task

_Tokens = Sequence[tuple[int, bool]]
"""Token ids, each with whether it is trained."""


def preview_rows(
    rows: TaskRows | CachedRows,
    tokenizer: Any,
    task: Task,
    *,
    num_rows: int,
    limits: ModelLimits | None = None,
    head: HeadStore | None = None,
) -> DataPreview:
    """Encode ``rows`` and return their counts and ``num_rows`` examples: the first, of every label if there are labels.

    Args:
        head: Store that kept only the first rows; None if all rows were read.

    Raises:
        DataError: See :meth:`TaskRows.encode`.
    """
    data = rows.encode(tokenizer, limits)
    is_cut = head is not None and head.is_cut
    # A part of the rows does not show how many validation rows there are, and how many of them are trained too.
    unreliable = reading_notes(len(rows.validation), data.num_repeated) if is_cut else []
    lengths = data.train.sequence_lengths
    return DataPreview(
        dataset=task.dataset_name,
        model=task.model,
        form=rows.layout.form,
        columns=dict(rows.layout.columns),
        max_length=rows.max_length,
        counts=data.counts(),
        row_tokens=(min(lengths), statistics.median(lengths), max(lengths)),
        notes=tuple(note for note in data.notes if note not in unreliable),
        examples=tuple(_example(data.train, row, tokenizer) for row in _varied_rows(data.train, num_rows)),
        num_read=head.num_rows if head is not None and is_cut else None,
    )


def _varied_rows(dataset: EncodedDataset, num_rows: int) -> list[int]:
    """Return the numbers of the rows to show: the first row of every label, then the others in their order."""
    first_rows = dict[str, int]()
    for row in range(len(dataset)):
        first_rows.setdefault(_label(dataset, row), row)
    return [*dict.fromkeys([*first_rows.values(), *range(len(dataset))])][:num_rows]


def _example(dataset: EncodedDataset, row: int, tokenizer: Any) -> PreviewExample:
    first, *others = _sequences(dataset, row)
    num_tokens = dataset.input_ids[row].numel()
    if not others:
        return PreviewExample(num_tokens=num_tokens, segments=_segments(first, tokenizer), label=_label(dataset, row))
    (second,) = others
    both = zip(first, second, strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1] and not pair[0][1], both))
    return PreviewExample(
        num_tokens=num_tokens,
        segments=_segments(first[:shared], tokenizer),
        chosen=_segments(first[shared:], tokenizer),
        rejected=_segments(second[shared:], tokenizer),
    )


def _label(dataset: EncodedDataset, row: int) -> str:
    """Return the names of a row's labels, or its numbers; empty if it has none."""
    if dataset.classes is None or dataset.label_set is None:
        return ""
    label, names = dataset.classes[row], dataset.label_set.names
    if isinstance(label, int):
        return names[label]
    if dataset.label_set.problem_type == "regression":
        return ", ".join(f"{number:g}" for number in label)
    return ", ".join(name for name, mark in zip(names, label, strict=True) if mark) or "none"


def _sequences(dataset: EncodedDataset, row: int) -> list[_Tokens]:
    """Return every sequence of a row as the model sees it, with its prefix."""
    ids = dataset.input_ids[row].tolist()
    # A target is the token after its position.
    is_trained = [False, *(dataset.targets[row] >= 0).tolist()[:-1]]
    tokens = list(zip(ids, is_trained, strict=True))
    sequences: list[_Tokens] = []
    start = 0
    for span in dataset.spans[row]:
        prefix = sequences[-1][: span.prefix] if span.prefix else ()
        sequences.append([*prefix, *tokens[start : start + span.length]])
        start += span.length
    return sequences


def _segments(tokens: _Tokens, tokenizer: Any) -> Segments:
    runs = groupby(tokens, key=lambda token: token[1])
    return tuple(
        (tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False), is_trained)
        for is_trained, run in runs
    )
