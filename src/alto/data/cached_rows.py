"""The rows of a task: in memory, or, of data that are large or slow to tokenise, their tokens on disk, in the token
cache."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from alto.data.conversation import Row
from alto.data.formats import Layout
from alto.data.identity import changed, code_digest, digest_of_json, tokenizer_digest
from alto.data.reading import TaskSources
from alto.data.row_store import MEMORY, DiskStore, HeadStore, writing_cache
from alto.data.task_data import TaskData
from alto.data.task_rows import ReadRows, TaskRows
from alto.data.token_cache import TokenCache
from alto.errors import RunWriteError, UnsupportedError
from alto.records import ModelLimits
from alto.runs import replace_file
from alto.spec import Task
from alto.spec.cache_home import cache_home
from alto.spec.data_keys import DataKeys
from alto.spec.method import find_method, learns_from_pairs

__all__ = ["LARGE_BYTES", "SLOW_BYTES", "read_task_rows"]

LARGE_BYTES = 256 * 2**20
"""Size of a task's texts from which ``token_cache: auto`` means ``disk``."""

SLOW_BYTES = 4 * 2**20
"""Size of a task's texts from which ``token_cache: auto`` keeps their tokens on disk, where it can: one core tokenises
about so much in ten seconds."""

_WITHOUT_EFFECT = {"name", "model", "chat_template", "token_cache"}
"""Keys about data that do not change which rows there are; the chat template belongs to the tokenizer."""


def read_task_rows(task: Task, *, head: HeadStore | None = None) -> ReadRows:
    """Read and split what ``task`` names; of a mixture every source by itself, with the task's ``validation_split`` and
    ``test_split`` of each. Rows that are in the token cache already, and have been read without an error, are not read
    again.

    Args:
        task: The task.
        head: Takes the first rows of every dataset instead of all, where to tokenise all would take long; not of texts
            with labels, since the labels are those of all rows.

    Raises:
        BadRowsError: Rows cannot be used, and these are not skipped, or all of a dataset's.
        DataError: See :func:`alto.data.source.open_source`, :meth:`TaskSources.read`.
        RunWriteError: The token cache cannot be written; of a full disk a :class:`DiskFullError`.
    """
    sources = TaskSources(task)
    if find_method(task.method).entry.problem_types:
        return sources.read(MEMORY)  # its labels have no place in the token cache
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
    warnings.warn(f"The tokens are in memory, and made anew at every start: {error}", stacklevel=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """What is kept of rows that could be read without an error."""

    layout: Layout
    max_length: int


_CODEC = TypeAdapter(_Reading)


class _CachedRows:
    """Rows that are read when they are needed: where no earlier process has read them, or their tokens are not in the
    cache.

    Args:
        task: The task.
        sources: Its datasets.
        cache: The token cache.
        needs_disk: Whether neither texts nor tokens may be in memory, so that a cache that cannot be used is an error.
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
        """Training rows, on disk."""
        return self._read().train

    @property
    def validation(self) -> Sequence[Row]:
        """Validation rows, on disk."""
        return self._read().validation

    def encode(self, tokenizer: Any, limits: ModelLimits | None = None) -> TaskData:
        """As :meth:`TaskRows.encode`, with the tokens on disk. Where that fails and they may be in memory, they are
        there, with a warning.

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
        # A template that writes the date gives other tokens tomorrow.
        is_dated = "strftime_now" in str(getattr(tokenizer, "chat_template", None))
        date = datetime.date.today().isoformat() if is_dated else None
        of_model = [tokenizer_digest(tokenizer), limits.max_positions, limits.vocab_size, date]
        return self._cache.data(
            digest_of_json([self._key, of_model]),
            lambda new_writer: self._read().encode(tokenizer, limits, new_writer=new_writer),
        )

    def _read(self) -> TaskRows:
        """The rows.

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
    """All settings of ``task`` that decide its rows and who may find them, as JSON values."""
    entry = find_method(task.method).entry
    keys = task.model_dump(mode="json", include=set(DataKeys.model_fields) - _WITHOUT_EFFECT)
    # Tokens of another tenant would show by the time that they save.
    return {**keys, "tenant": task.tenant, "method": [task.method, learns_from_pairs(task.method), entry.is_labelled]}
