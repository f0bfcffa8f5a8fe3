"""The token ids and targets of one split, `EncodedDataset`, and the stores that hold rows."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import pickle
import tempfile
import weakref
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from torch import Tensor

from alto.base import write_error
from alto.data.rows import BadRows, Chain, Item, LazySequence, View
from alto.records import LabelSet, RowLabel

_REMEDY = (
    "free disk space, name a folder on another disk with the environment variable ALTO_CACHE, or keep the data in "
    "memory with token_cache: memory"
)
_CHUNK_ROWS = 64


@contextlib.contextmanager
def writing_cache(folder: Path) -> Iterator[None]:
    """Translate a failure to write in ``folder``, a folder of the token cache.

    Raises:
        RunWriteError: An ``OSError`` was raised inside; :class:`DiskFullError` if the disk is full.
    """
    try:
        yield
    except OSError as error:
        raise write_error(folder, error, _REMEDY) from error


def close_abandoned(file: IO[bytes]) -> None:
    """Close a file that is not needed any more; data that is not on the disk yet may be lost."""
    with contextlib.suppress(OSError):
        file.close()


class RowStore:
    """A store that keeps rows in lists until they are tokenised."""

    def keep(self, rows: Iterable[Item]) -> Sequence[Item]:
        """Store all ``rows``, which are read once."""
        return list(rows)

    def choose(self, rows: Sequence[Item], indices: Sequence[int]) -> Sequence[Item]:
        """Return the rows with these indices, in the order of the indices."""
        return [rows[index] for index in indices]

    def chain(self, parts: Sequence[Sequence[Item]]) -> Sequence[Item]:
        """Return the rows of all ``parts``, one part after the other."""
        return [row for part in parts for row in part]


MEMORY = RowStore()
"""The store for data that fits into memory."""


class HeadStore(RowStore):
    """A store that keeps the first ``num_rows`` rows of every dataset in lists, and does not read the others.

    Attributes:
        is_cut: Whether rows have been left out.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.is_cut = False

    def keep(self, rows: Iterable[Item]) -> Sequence[Item]:
        left = iter(rows)
        kept = list(itertools.islice(left, self.num_rows))
        self.is_cut |= any(True for _ in itertools.islice(left, 1))
        return kept

    def choose(self, rows: Sequence[Item], indices: Sequence[int]) -> Sequence[Item]:
        self.is_cut |= len(indices) > self.num_rows
        return super().choose(rows, indices[: self.num_rows])


class _ViewStore(RowStore):
    """A store that keeps rows in lists, and refers to the parts of a chain instead of copying them."""

    def chain(self, parts: Sequence[Sequence[Item]]) -> Sequence[Item]:
        return parts[0] if len(parts) == 1 else Chain(parts)


VIEWS = _ViewStore()
"""The store for rows that are already stored elsewhere, in memory or on disk."""


class DiskStore(_ViewStore):
    """A store that keeps rows in unnamed files in ``folder``. The files disappear when this process ends or is killed.

    Eight bytes per row, and some rows of each file, are in memory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, rows: Iterable[Item]) -> Sequence[Item]:
        """Store all ``rows``, which are read once.

        Raises:
            RunWriteError: They cannot be written; :class:`DiskFullError` if the disk is full.
        """
        return _StoredRows(rows, self._folder)

    def choose(self, rows: Sequence[Item], indices: Sequence[int]) -> Sequence[Item]:
        return View(rows, indices if isinstance(indices, range) else array("q", indices))


class _StoredRows(LazySequence[Item]):
    """Rows in an unnamed file, in chunks; the chunk that was read last stays in memory."""

    def __init__(self, rows: Iterable[Item], folder: Path) -> None:
        left = iter(rows)
        with writing_cache(folder):
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed when the rows are not used any more)
        weakref.finalize(self, close_abandoned, self._file)
        self._stops = array("q", [0])
        self._num_rows = 0
        while chunk := list(itertools.islice(left, _CHUNK_ROWS)):
            stored = pickle.dumps(chunk, protocol=pickle.HIGHEST_PROTOCOL)
            with writing_cache(folder):
                self._file.write(stored)
            self._stops.append(self._stops[-1] + len(stored))
            self._num_rows += len(chunk)
        with writing_cache(folder):
            self._file.flush()
        self._number, self._chunk = -1, list[Item]()

    def __len__(self) -> int:
        return self._num_rows

    def _item(self, index: int) -> Item:
        number, place = divmod(index, _CHUNK_ROWS)
        if number != self._number:
            start, stop = self._stops[number], self._stops[number + 1]
            self._number, self._chunk = number, pickle.loads(os.pread(self._file.fileno(), stop - start, start))
        return self._chunk[place]


_COUNTS = ("num_truncated", "num_skipped", "num_masked", "num_unrolled", "num_alike", "num_shortened")
"""Attributes of a split that count the rows or replies that tokenisation changed or left out."""

IGNORED = -100
"""The target of a position where nothing is trained."""


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence of a row: ``length`` tokens, which continue after the first ``prefix`` tokens of the span before."""

    length: int
    prefix: int = 0


class Advantage(NamedTuple):
    """The weight of a sampled completion in the loss of its job.

    Attributes:
        value: Its advantage: its reward relative to the mean reward of its prompt.
        factor: Factor on the sum over its tokens in the mean over the rows of a step.
    """

    value: float
    factor: float


class RowCounts(NamedTuple):
    """Counts for every row, as in :class:`EncodedDataset`."""

    num_row_tokens: Sequence[int]
    num_trained: Sequence[int]
    num_chosen: Sequence[int]


class RowWriter:
    """A receiver of the rows of a split while they are tokenised; this one keeps them in memory."""

    def __init__(self) -> None:
        self._rows: list[tuple[Tensor, Tensor, tuple[Span, ...], RowLabel | None, str]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self,
        input_ids: Tensor,
        targets: Tensor,
        spans: tuple[Span, ...],
        *,
        label: RowLabel | None = None,
        columns: str = "",
    ) -> None:
        """Add one row.

        Args:
            input_ids, targets: Vectors of equal length, int64; a target is the next token id, or :data:`IGNORED`.
            label: Whether the reply is desirable, or the label of a text; None if the row has none.
            columns: The row's other columns (:attr:`EncodedDataset.columns`); empty if they are not kept.
        """
        self._rows.append((input_ids, targets, spans, label, columns))

    def dataset(self, *, is_labelled: bool = False, **facts: Any) -> EncodedDataset:
        """Return a split of all rows; none can be added afterwards.

        Args:
            is_labelled: Whether the labels of rows say that a reply is desirable.
            facts: Other attributes of the split.
        """
        labels: Any = tuple(label for *_, label, _ in self._rows)
        columns = tuple(of_row for *_, of_row in self._rows)
        return EncodedDataset(
            input_ids=tuple(input_ids for input_ids, *_ in self._rows),
            targets=tuple(targets for _, targets, *_ in self._rows),
            spans=tuple(spans for _, _, spans, *_ in self._rows),
            labels=labels if is_labelled else None,
            classes=None if facts.get("label_set") is None or None in labels else labels,
            columns=columns if any(columns) else None,
            **facts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A part of the conversations of a split that does not change the output of the chat template.

    Attributes:
        what: A key of messages; ``row: tools`` for a key beside the messages; ``role: tool`` for the turns of a role.
        count, total: Number of places where the part is not read, and of all places where it occurs.
    """

    what: str
    count: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedDataset:
    """All rows of a split, tokenised.

    A conversation is one sequence. A pair is two sequences, the chosen and the rejected one, concatenated; their common
    beginning is stored once, except for its last token, which predicts the first token of each reply.

    Attributes:
        input_ids: One vector of token ids per row.
        targets: Per row, the token that each position has to predict; :data:`IGNORED` where nothing is trained. For
            labelled texts, 0 at the position whose hidden state the classification head reads.
        num_truncated: Number of rows cut at ``max_length``.
        num_skipped: Number of rows left out, for any reason.
        num_masked: Number of rows left out because nothing is trained in them, or in one reply of a pair, at any
            length.
        num_unrolled: Number of conversations that became one row per reply.
        num_alike: Number of pairs left out because both replies have the same tokens.
        num_shortened: Number of trained replies from which the chat template removes text.
        refused: Rows that the chat template refuses, by source; not counted as skipped.
        unread: Parts of the conversations that are not read.
        spans: The sequences of every row; by default one each.
        sources: Name and number of rows of every source of a mixture, in the order of the rows.
        labels: Whether the reply of each row is desirable; None if replies have no labels.
        classes: The class label of each row; None if the rows are not labelled texts, or have no labels.
        label_set: All labels; None if the rows are not labelled texts.
        columns: The other columns of every row, for reward functions: each the text of a JSON object, or empty. None
            if they are not kept.
        advantages: The weight of every row, if rows are sampled completions; None for other rows.
        max_length: Number of tokens at which rows were cut; None if unknown.
        references: ``[rows, 2]`` float64, nats: reference log-probs of the chosen and the rejected reply of every pair.
            For other rows, the first value is of the trained tokens and the second is 0. None until they are computed.
        reference_tails: ``[rows, 2]`` float64, nats: the part of ``references`` that comes from tokens beyond the
            length of the pair's shorter reply; None if unknown.
        num_trained: Number of trained tokens of every row.
        num_chosen: Number of trained tokens in the chosen reply of every pair; for other rows, of all trained tokens.
        weights: Weight of every row in a mean over rows: its number of trained tokens; 1 for pairs, rows with labels
            and sampled completions.
        counts: Known values of the three numbers of every row; None counts them.
    """

    input_ids: Sequence[Tensor]
    targets: Sequence[Tensor]
    num_truncated: int = 0
    num_skipped: int = 0
    num_masked: int = 0
    num_unrolled: int = 0
    num_alike: int = 0
    num_shortened: int = 0
    refused: tuple[BadRows, ...] = ()
    unread: tuple[Unread, ...] = ()
    spans: Sequence[tuple[Span, ...]] = ()
    sources: tuple[tuple[str, int], ...] = ()
    labels: Sequence[bool] | None = None
    classes: tuple[RowLabel, ...] | None = None
    label_set: LabelSet | None = None
    columns: Sequence[str] | None = None
    advantages: tuple[Advantage, ...] | None = None
    max_length: int | None = None
    references: Tensor | None = None
    reference_tails: Tensor | None = None
    num_row_tokens: Sequence[int] = field(init=False)
    num_trained: Sequence[int] = field(init=False)
    num_chosen: Sequence[int] = field(init=False)
    weights: Sequence[int] = field(init=False)
    counts: InitVar[RowCounts | None] = None

    def __post_init__(self, counts: RowCounts | None) -> None:
        # `dataclasses.replace` does not pass `counts` on, so counts of other rows are never kept.
        num_row_tokens = counts.num_row_tokens if counts else tuple(ids.numel() for ids in self.input_ids)
        object.__setattr__(self, "num_row_tokens", num_row_tokens)
        if not self.spans:
            object.__setattr__(self, "spans", tuple((Span(length),) for length in num_row_tokens))
        num_trained = counts.num_trained if counts else tuple(map(_num_trained, self.targets))
        object.__setattr__(self, "num_trained", num_trained)
        num_chosen = num_trained if not self.is_paired else counts.num_chosen if counts else self._count_chosen()
        object.__setattr__(self, "num_chosen", num_chosen)
        known = (self.labels, self.classes, self.advantages)
        is_mean_of_rows = self.is_paired or any(column is not None for column in known)
        object.__setattr__(self, "weights", (1,) * len(self) if is_mean_of_rows else self.num_trained)

    @property
    def _counts(self) -> RowCounts:
        return RowCounts(self.num_row_tokens, self.num_trained, self.num_chosen)

    def with_references(self, references: Tensor, reference_tails: Tensor) -> EncodedDataset:
        """Return the same rows with reference log-probs, both ``[rows, 2]``."""
        return replace(self, references=references, reference_tails=reference_tails, counts=self._counts)

    def _count_chosen(self) -> tuple[int, ...]:
        first_targets = (targets[: spans[0].length] for targets, spans in zip(self.targets, self.spans, strict=True))
        return tuple(map(_num_trained, first_targets))

    def __len__(self) -> int:
        return len(self.input_ids)

    def other_columns(self, row: int) -> Mapping[str, Any]:
        """Return the values of a row's other columns, by name; empty if they are not kept."""
        text = self.columns[row] if self.columns is not None else ""
        found: dict[str, Any] = json.loads(text) if text else {}
        return found

    def parts(self, num_rows: int) -> Iterator[EncodedDataset]:
        """Return consecutive parts of ``num_rows`` rows each; skipped rows are counted in no part."""
        return (self.rows(start, start + num_rows) for start in range(0, len(self), num_rows))

    def rows(self, start: int, stop: int) -> EncodedDataset:
        """Return the rows from ``start`` to ``stop - 1``, without sources; skipped rows are not counted."""
        return EncodedDataset(
            input_ids=self.input_ids[start:stop],
            targets=self.targets[start:stop],
            spans=self.spans[start:stop],
            labels=None if self.labels is None else self.labels[start:stop],
            classes=None if self.classes is None else self.classes[start:stop],
            label_set=self.label_set,
            columns=None if self.columns is None else self.columns[start:stop],
            max_length=self.max_length,
            counts=RowCounts(*(column[start:stop] for column in self._counts)),
        )

    @property
    def is_paired(self) -> bool:
        """Whether the rows are pairs."""
        return bool(self.spans) and len(self.spans[0]) == 2

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        """Number of tokens of every sequence including its prefix; the prompt of a pair counts in both sequences."""
        return tuple(self._sequence_lengths())

    def _sequence_lengths(self) -> Iterator[int]:
        return (span.prefix + span.length for spans in self.spans for span in spans)

    @property
    def longest_sequence(self) -> int:
        """Number of tokens of the longest sequence, including its prefix."""
        return max(self._sequence_lengths())

    @property
    def longest_row(self) -> int:
        """Number of tokens of the longest row, which is never split over micro-batches; for a pair, of both replies."""
        return max(self.num_row_tokens)

    @property
    def num_tokens(self) -> int:
        return sum(self.num_row_tokens)

    @property
    def num_trained_tokens(self) -> int:
        return sum(self.num_trained)


def joined(parts: Sequence[EncodedDataset], names: Sequence[str] = (), store: RowStore = MEMORY) -> EncodedDataset:
    """Concatenate the rows of several sources.

    Args:
        parts: One or more datasets, all of the same kind of rows.
        names: Names of the sources; empty if they are one dataset.
        store: Store that holds the rows of the parts.
    """
    unread: dict[str, Unread] = {}
    for one in (one for part in parts for one in part.unread):
        known = unread.get(one.what, Unread(what=one.what, count=0, total=0))
        unread[one.what] = Unread(what=one.what, count=known.count + one.count, total=known.total + one.total)
    return EncodedDataset(
        **chained(parts, store),
        **{count: sum(getattr(part, count) for part in parts) for count in _COUNTS},
        refused=tuple(bad for part in parts for bad in part.refused),
        unread=tuple(unread.values()),
        sources=tuple((name, len(part)) for name, part in zip(names, parts, strict=True)) if names else (),
        max_length=parts[0].max_length,
    )


def chained(parts: Sequence[EncodedDataset], store: RowStore) -> dict[str, Any]:
    """Return the columns of ``parts``, which have the same kind of rows, one part after the other, with their counts.

    Args:
        store: Store that holds the rows of the parts.
    """
    first = parts[0]
    has_columns = any(part.columns is not None for part in parts)
    return {
        "input_ids": store.chain([part.input_ids for part in parts]),
        "targets": store.chain([part.targets for part in parts]),
        "spans": store.chain([part.spans for part in parts]),
        "labels": None if first.labels is None else store.chain([part.labels or () for part in parts]),
        "classes": None if first.classes is None else tuple(label for part in parts for label in part.classes or ()),
        "label_set": first.label_set,
        "columns": store.chain([part.columns or ("",) * len(part) for part in parts]) if has_columns else None,
        "counts": RowCounts(*map(store.chain, zip(*(part._counts for part in parts), strict=True))),
    }


def digest_of(*datasets: EncodedDataset) -> str:
    """Return a digest of all tokens and targets in order, the layout of pairs, the labels, the other columns, and the
    sizes of sources."""
    return running_digests(*datasets)[-1]


def running_digests(*datasets: EncodedDataset) -> tuple[str, ...]:
    """Return, for each dataset, the :func:`digest_of` it and the datasets before it; tokens are read once."""
    digest = hashlib.sha256()
    found = []
    for dataset in datasets:
        for rows in (dataset.input_ids, dataset.targets):
            for row in rows:
                digest.update(row.numel().to_bytes(8, "little"))
                digest.update(row.numpy().tobytes())
        if dataset.is_paired:
            _add_listed(digest, "[]", ([(span.length, span.prefix) for span in spans] for spans in dataset.spans))
        if dataset.labels is not None:
            _add_listed(digest, "()" if len(dataset) > 1 else ("(", ",)"), dataset.labels)
        if dataset.classes is not None:
            digest.update(repr((dataset.label_set, dataset.classes)).encode())
        if dataset.columns is not None:
            _add_listed(digest, "[]", dataset.columns)
        if dataset.sources:
            digest.update(repr(dataset.sources).encode())
        found.append(digest.hexdigest())
    return tuple(found)


def _add_listed(digest: hashlib._Hash, brackets: Sequence[str], items: Iterable[object]) -> None:
    """Add the text that Python writes for a list or tuple of ``items``, without building the whole text."""
    opening, closing = brackets
    digest.update(opening.encode())
    for index, item in enumerate(items):
        digest.update(f"{', ' if index else ''}{item!r}".encode())
    digest.update(closing.encode())


def _num_trained(targets: Tensor) -> int:
    return int((targets != IGNORED).sum())
