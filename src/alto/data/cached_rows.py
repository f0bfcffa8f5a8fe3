"""Reads the rows of a task into memory; if they are large or slow to tokenise, their tokens are kept on disk, in the
token cache.
"""

from __future__ import annotations

import datetime
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from alto.base import cache_home, replace_file
from alto.data.dataset import (
    MEMORY,
    DiskStore,
    EncodedDataset,
    HeadStore,
    writing_cache,
)
from alto.data.formats import Layout
from alto.data.messages import Row
from alto.data.reading import TaskSources
from alto.data.source import changed, code_digest, digest_of_json, tokenizer_digest
from alto.data.task_data import (
    TaskData,
    reading_notes,
)
from alto.data.task_rows import ReadRows, TaskRows
from alto.data.token_cache import TokenCache
from alto.errors import RunWriteError, UnsupportedError
from alto.records import DataPreview, ModelLimits, PreviewExample, Segments
from alto.spec import DataKeys, Task, find_method

_Tokens = Sequence[tuple[int, bool]]
"""Token ids, each with whether it is trained."""


def preview_rows(
    rows: ReadRows,
    tokenizer: Any,
    task: Task,
    *,
    num_rows: int,
    limits: ModelLimits | None = None,
    head: HeadStore | None = None,
) -> DataPreview:
    """Encode ``rows`` and return their counts and the first ``num_rows`` examples.

    Args:
        head: Store that kept only the first rows; None if all rows were read.

    Raises:
        DataError: See :meth:`TaskRows.encode`.
    """
    data = rows.encode(tokenizer, limits)
    is_cut = head is not None and head.is_cut
    # A part of the rows does not show how many validation rows there are, and how many of them are trained too.
    untold = reading_notes(len(rows.validation), data.num_shared) if is_cut else []
    lengths = data.train.sequence_lengths
    return DataPreview(
        dataset=task.dataset_name,
        model=task.model,
        form=rows.layout.form,
        columns=dict(rows.layout.columns),
        max_length=rows.max_length,
        counts=data.counts(),
        row_tokens=(min(lengths), statistics.median(lengths), max(lengths)),
        notes=tuple(note for note in data.notes if note not in untold),
        examples=tuple(_example(data.train, row, tokenizer) for row in range(min(num_rows, len(data.train)))),
        num_read=head.num_rows if head is not None and is_cut else None,
    )


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


LARGE_BYTES = 256 * 2**20
"""Size of a task's texts from which ``token_cache: auto`` means ``disk``, in bytes."""


SLOW_BYTES = 4 * 2**20
"""Size of a task's texts from which ``token_cache: auto`` keeps tokens on disk if possible, in bytes: one core
tokenises about this much in ten seconds."""


_WITHOUT_EFFECT = {"name", "model", "chat_template", "token_cache"}
"""Data keys that do not change which rows there are; the chat template belongs to the tokenizer."""


def read_task_rows(task: Task, *, head: HeadStore | None = None) -> ReadRows:
    """Read and split the rows of ``task``.

    Every source of a mixture is split by itself, with the task's ``validation_split`` and ``test_split``. Rows whose
    tokens are in the token cache, and that were read without an error, are not read again.

    Args:
        head: Store that takes only the first rows of every dataset, used if tokenising all rows would take long. Not
            used for labelled texts, since their labels come from all rows.

    Raises:
        BadRowsError: Rows cannot be used and bad rows are not skipped, or no row of a dataset can be used.
        DataError: See :func:`alto.data.source.open_source`, :meth:`TaskSources.read`.
        RunWriteError: The token cache cannot be written; :class:`DiskFullError` if the disk is full.
    """
    sources = TaskSources(task)
    if find_method(task.method).entry.problem_types:
        return sources.read(MEMORY)  # the token cache does not store labels of texts
    if head is not None and sources.num_bytes >= SLOW_BYTES:
        return sources.read(head)
    is_auto, num_bytes = task.token_cache == "auto", sources.num_bytes
    needs_disk = task.token_cache == "disk" or (is_auto and num_bytes >= LARGE_BYTES)
    if needs_disk or (is_auto and num_bytes >= SLOW_BYTES):
        try:
            return _CachedRows(task, sources, TokenCache(cache_home() / "tokens"), needs_disk=needs_disk)
        except RunWriteError as error:
            if needs_disk:
                raise
            _warn(error)
    return sources.read(MEMORY)


def _warn(error: Exception) -> None:
    warnings.warn(f"The tokens are held in memory, and computed again at every start: {error}", stacklevel=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """Facts that are kept about rows that were read without an error."""

    layout: Layout
    max_length: int


_CODEC = TypeAdapter(_Reading)


class _CachedRows:
    """Rows that are read only when needed: if no earlier process has read them, or their tokens are not in the cache.

    Args:
        needs_disk: Whether texts and tokens must stay out of memory, so that an unusable cache is an error.
    """

    labels = None

    def __init__(self, task: Task, sources: TaskSources, cache: TokenCache, *, needs_disk: bool) -> None:
        self._needs_disk = needs_disk
        self._sources = sources
        self._cache = cache
        self._identity = sources.identity(cache.folder)
        self._key = [code_digest(), _settings(task), self._identity]
        self._rows: TaskRows | None = None
        name = digest_of_json(self._key)
        file = cache.folder / f"{name}.rows.json"
        with cache.locked(name):
            reading = _known(file)
            if reading is None:
                rows = self._read()
                reading = _Reading(layout=rows.layout, max_length=rows.max_length)
                with writing_cache(cache.folder):
                    replace_file(file, _CODEC.dump_json(reading))
        self.layout = reading.layout
        self.max_length = reading.max_length

    @property
    def train(self) -> Sequence[Row]:
        """The training rows; on disk if ``needs_disk``."""
        return self._read().train

    @property
    def validation(self) -> Sequence[Row]:
        """The validation rows; on disk if ``needs_disk``."""
        return self._read().validation

    def encode(self, tokenizer: Any, limits: ModelLimits | None = None) -> TaskData:
        """Tokenise every split as :meth:`TaskRows.encode` does, and keep the tokens on disk.

        If that fails and tokens may be in memory, warn and keep them in memory.

        Raises:
            RunWriteError: The token cache cannot be written.
            UnsupportedError: The tokenizer cannot be saved, so its tokens cannot be found again.
        """
        try:
            return self._encode(tokenizer, limits)
        except (RunWriteError, UnsupportedError) as error:
            if self._needs_disk:
                raise
            _warn(error)
            return self._read().encode(tokenizer, limits)

    def _encode(self, tokenizer: Any, limits: ModelLimits | None) -> TaskData:
        limits = limits or ModelLimits()
        # A template that writes the date gives different tokens tomorrow.
        is_dated = "strftime_now" in str(getattr(tokenizer, "chat_template", None))
        date = datetime.date.today().isoformat() if is_dated else None
        of_model = [tokenizer_digest(tokenizer), limits.max_positions, limits.vocab_size, date]
        return self._cache.data(
            digest_of_json([self._key, of_model]),
            lambda new_writer: self._read().encode(tokenizer, limits, new_writer=new_writer),
        )

    def _read(self) -> TaskRows:
        """Read the rows, once.

        Raises:
            DataError: Their files have changed since they were found.
        """
        if self._rows is None:
            rows = self._sources.read(DiskStore(self._cache.folder) if self._needs_disk else MEMORY)
            if self._sources.identity(self._cache.folder) != self._identity:
                raise changed(self._sources.name)
            self._rows = rows
        return self._rows


def _known(file: Path) -> _Reading | None:
    try:
        return _CODEC.validate_json(file.read_bytes())
    except (OSError, ValueError):
        return None


def _settings(task: Task) -> dict[str, Any]:
    """Return all settings of ``task`` that decide its rows and who may reuse their tokens, as JSON values."""
    entry = find_method(task.method).entry
    keys = task.model_dump(mode="json", include=set(DataKeys.model_fields) - _WITHOUT_EFFECT)
    # A tenant could tell from the time saved that another tenant has the same data, so tenants share no tokens.
    return {**keys, "tenant": task.tenant, "method": [task.method, entry.is_paired, entry.is_labelled]}
