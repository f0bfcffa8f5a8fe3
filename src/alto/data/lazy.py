"""Sequences whose items are made or read when they are used."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar, overload

__all__ = ["Chain", "LazySequence", "View"]

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
