"""Rows that cannot be used: listed in one error, or left out and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from alto.data.rows import FaultKind, RowError, RowFault
from alto.errors import BadRowsError
from alto.spec import OnBadRow

__all__ = ["LIST_LENGTH", "BadRows", "FaultList"]

LIST_LENGTH = 20
"""Maximum number of different faults that an error lists; rows with the same fault count as one."""

_NUM_PLACES = 10
"""Maximum number of other rows with the same fault whose places are listed."""

_LEAVE_OUT = "on_bad_row: skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRows:
    """The rows of one dataset that were left out.

    Attributes:
        key: The task's key that names the dataset.
        num_rows: Number of rows of the dataset, including the bad ones.
        kinds: Number of bad rows by kind of fault, the most frequent kind first.
        first: Place of the first bad row.
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
            f"{_rows(self.num_bad)} of {self.num_rows:,} of {self.key} left out ({_LEAVE_OUT}): {_counts(self.kinds)}; "
            f"the first is {self.first}."
        )


@dataclass(slots=True)
class _Alike:
    """Rows with the same fault.

    Attributes:
        first: The first of them, whose text is shown for all.
        places: Places of the next ones.
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
        """The first fault, and the places of the others."""
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
    """Return the places of rows as text that names each file once: ``train.jsonl:3, 5, other.jsonl:1``."""
    shown, last = [], ""
    for place in places:
        file, colon, line = place.rpartition(":")
        shown.append(line if colon and file == last else place)
        last = file
    return ", ".join(shown)


def _counts(kinds: Mapping[FaultKind, int]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"
