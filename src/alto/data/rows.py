"""A row of a dataset before its form is known, the faults of rows, and quoting of their values in messages."""

from __future__ import annotations

import itertools
import reprlib
from abc import abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar, overload

from alto.errors import BadRowsError, DataError, DataFormatError, ModelError
from alto.records import ModelLimits
from alto.spec import OnBadRow

_MAX_NAMES = 12

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 60
_repr.maxlevel = 3


class FaultKind(StrEnum):
    """Kinds of faults of a row, worded to follow a number of rows: "3 not JSON"."""

    NOT_JSON = "not JSON"
    NOT_UTF8 = "not UTF-8 text"
    NOT_AN_OBJECT = "not an object"
    OTHER_CELLS = "with another number of cells"
    UNREADABLE = "with a value that cannot be read"
    NO_COLUMNS = "without the columns of the others"
    WRONG_VALUE = "with a value of the wrong kind"
    BAD_MESSAGE = "with a message of no known role or shape"
    NO_REPLY = "without a reply"
    EMPTY_REPLY = "with an empty reply or text"
    EQUAL_REPLIES = "with two equal replies"
    UNLIKE_PROMPTS = "with conversations that do not part in a reply"
    NO_LABEL = "without a label"
    UNKNOWN_LABEL = "with a label that is not among the others"
    REFUSED = "refused by the chat template"


@dataclass(frozen=True, slots=True)
class RowFault:
    """The reason why a row cannot be used; ``reason`` is a sentence: "expected …, found …; remedy"."""

    kind: FaultKind
    reason: str


class RowError(DataFormatError):
    """An error about a row that cannot be used; ``where`` is the file and line of the row."""

    def __init__(self, where: str, fault: RowFault) -> None:
        super().__init__(f"{where}: {fault.reason}")
        self.where = where
        self.fault = fault


class ConversationError(DataError):
    """A conversation that cannot be tokenised with the chat template."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """The values of one row by column.

    Attributes:
        where: File and line of the row, for messages: ``train.jsonl:7``.
        values: Values by column; empty if there is a fault.
        fault: The reason why the row could not be read; None if it could.
    """

    where: str
    values: Mapping[str, Any]
    fault: RowFault | None = None


def quoted(value: object) -> str:
    """Return ``value`` shortened, with control characters, terminal escapes and broken letters written out."""
    return _repr.repr(value)


def broken_part(text: str) -> str | None:
    """Return the part of ``text`` around its first character that UTF-8 cannot hold; None if there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[max(0, error.start - 20) : error.start + 20]
    return None


def counted(count: int, what: str) -> str:
    """Return a count of things with their name, in the plural unless there is one."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def listed(names: Iterable[str]) -> str:
    """Return names of columns, cleaned as :func:`quoted` does; ``none`` if there are none.

    A name that is empty, or has a comma or surrounding spaces, is in quotes."""
    shown = [
        quoted(name)[1:-1] if name and name == name.strip() and "," not in name else quoted(name) for name in names
    ]
    more = [f"and {len(shown) - _MAX_NAMES} more"] if len(shown) > _MAX_NAMES else []
    return ", ".join([*shown[:_MAX_NAMES], *more]) or "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLimit:
    """The number of tokens at which rows are cut.

    Attributes:
        name: Description of the limit, for messages.
        remedy: Advice in case too much is cut.
    """

    num_tokens: int
    name: str
    remedy: str


def row_limit(max_length: int, limits: ModelLimits) -> RowLimit:
    """Return the smaller limit of the task's ``max_length`` and the model's positions."""
    positions = limits.max_positions
    if positions is None or max_length <= positions:
        return RowLimit(num_tokens=max_length, name=f"max_length {max_length}", remedy="raise max_length")
    return RowLimit(
        num_tokens=positions,
        name=f"the model's {positions} positions, which are fewer than max_length {max_length}",
        remedy="shorten the rows, or use a base model with more positions",
    )


def check_token_ids(ids: Sequence[int], limits: ModelLimits, tokenizer: Any, where: str) -> None:
    """Check that the model has an embedding for every token of a row.

    Args:
        tokenizer: Tokenizer that names the token in the message.
        where: The row, for messages.

    Raises:
        ModelError: A token has no embedding. (On a GPU, a missing embedding would end the process.)
    """
    largest = max(ids, default=-1)
    if limits.vocab_size is not None and largest >= limits.vocab_size:
        raise ModelError(
            f"model: expected token ids below the {limits.vocab_size:,} rows of its embedding, found {largest:,} "
            f"({tokenizer.convert_ids_to_tokens(largest)!r}) in {where}; use the tokenizer that the model was trained "
            "with, or give the embedding a trained row for every token (resize_token_embeddings) and save both"
        )


Item = TypeVar("Item")


class LazySequence(Sequence[Item], Generic[Item]):
    """A sequence whose slices are views."""

    @abstractmethod
    def _item(self, index: int) -> Item:
        """Return the item at ``index``, which is from 0 to ``len(self) - 1``."""

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        places = range(len(self))
        return View(self, places[index]) if isinstance(index, slice) else self._item(places[index])

    def __iter__(self) -> Iterator[Item]:
        return map(self._item, range(len(self)))


class View(LazySequence[Item]):
    """Some items of a sequence.

    Args:
        indices: Indices of the chosen items, in order.
    """

    def __init__(self, items: Sequence[Item], indices: Sequence[int]) -> None:
        self._items = items
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def _item(self, index: int) -> Item:
        return self._items[self._indices[index]]


class Chain(LazySequence[Item]):
    """The items of several sequences, one sequence after the other."""

    def __init__(self, parts: Sequence[Sequence[Item]]) -> None:
        self._parts = tuple(parts)
        self._firsts = tuple(itertools.accumulate(map(len, self._parts), initial=0))

    def __len__(self) -> int:
        return self._firsts[-1]

    def _item(self, index: int) -> Item:
        part = bisect_right(self._firsts, index) - 1
        return self._parts[part][index - self._firsts[part]]

    def __iter__(self) -> Iterator[Item]:
        return itertools.chain.from_iterable(self._parts)


LIST_LENGTH = 20
"""Maximum number of different faults that an error lists; rows with the same fault count as one."""

_NUM_PLACES = 10
"""Maximum number of other rows with the same fault that are listed."""

_LEAVE_OUT = "on_bad_row: skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRows:
    """The rows of one dataset that were left out.

    Attributes:
        key: The task's key that names the dataset.
        num_rows: Number of rows of the dataset, including the bad ones.
        kinds: Number of bad rows by kind of fault, the most frequent kind first.
        first: File and line of the first bad row.
    """

    key: str
    num_rows: int
    kinds: Mapping[FaultKind, int]
    first: str

    @property
    def num_bad(self) -> int:
        return sum(self.kinds.values())

    @property
    def note(self) -> str:
        """A notice for the user, one sentence."""
        return (
            f"{self.key}: {self.num_bad:,} of {self.num_rows:,} rows left out ({_LEAVE_OUT}): {_counts(self.kinds)}; "
            f"the first is {self.first}."
        )


@dataclass(slots=True)
class _Alike:
    """Rows with the same fault.

    Attributes:
        first: Text of the first fault, which is shown for all.
        places: Files and lines of the next rows.
        num_others: Number of rows without the first.
    """

    first: RowError
    places: list[str] = field(default_factory=list)
    num_others: int = 0

    def add(self, where: str) -> None:
        self.num_others += 1
        if len(self.places) < _NUM_PLACES:
            self.places.append(where)

    @property
    def lines(self) -> list[str]:
        """The first fault, and the lines of the others."""
        if not self.num_others:
            return [f"  {self.first}"]
        more = ", …" if self.num_others > len(self.places) else ""
        return [f"  {self.first}", f"    {self.num_others:,} more like it: {_places(self.places)}{more}"]


@dataclass(slots=True)
class FaultList:
    """The faults of one dataset's rows, in order; of equal faults, only the text of the first is kept.

    Attributes:
        key: The task's key that names the dataset, for messages.
    """

    key: str
    _listed: dict[tuple[FaultKind, str], _Alike] = field(default_factory=dict)
    _first: str = ""
    _kinds: Counter[FaultKind] = field(default_factory=Counter)

    def add(self, where: str, fault: RowFault) -> None:
        """Add the fault of the row at ``where``."""
        self.add_error(RowError(where, fault))

    def add_error(self, error: RowError) -> None:
        """Add the fault of ``error``."""
        kind = error.fault.kind
        self._kinds[kind] += 1
        self._first = self._first or error.where
        expected = error.fault.reason.partition(", found ")[0]
        alike = self._listed.get((kind, expected))
        if alike is not None:
            alike.add(error.where)
        elif len(self._listed) < LIST_LENGTH:
            self._listed[kind, expected] = _Alike(error)

    def settle(self, num_rows: int, on_bad_row: OnBadRow) -> BadRows | None:
        """Return the rows to leave out, which are not all rows; None if every row can be used.

        Raises:
            BadRowsError: There are bad rows and ``on_bad_row`` is ``error``; or no row can be used.
        """
        num_bad = self._kinds.total()
        if not num_bad:
            return None
        if on_bad_row == "skip" and num_bad < num_rows:
            kinds = dict(self._kinds.most_common())
            return BadRows(key=self.key, num_rows=num_rows, kinds=kinds, first=self._first)
        raise BadRowsError(_message(self.key, list(self._listed.values()), self._kinds, num_rows))


def _message(key: str, faults: Sequence[_Alike], kinds: Counter[FaultKind], num_rows: int) -> str:
    num_bad = kinds.total()
    is_all = num_bad == num_rows
    if num_bad == 1:
        return str(faults[0].first) + ("" if is_all else f", or leave it out with {_LEAVE_OUT}")
    found = f"{'all' if is_all else f'{num_bad:,} of'} {num_rows:,} bad ({_counts(dict(kinds.most_common()))})"
    remedy = "correct them" + ("" if is_all else f", or leave them out with {_LEAVE_OUT}")
    first = f"; the first {LIST_LENGTH} faults" if num_bad > sum(1 + alike.num_others for alike in faults) else ""
    lines = (line for alike in faults for line in alike.lines)
    return "\n".join((f"{key}: expected rows that can be used, found {found}; {remedy}{first}:", *lines))


def _places(places: Sequence[str]) -> str:
    """Return files and lines as text that names each file once: ``train.jsonl:3, 5, other.jsonl:1``."""
    shown, last = [], ""
    for place in places:
        file, colon, line = place.rpartition(":")
        shown.append(line if colon and file == last else place)
        last = file
    return ", ".join(shown)


def _counts(kinds: Mapping[FaultKind, int]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
