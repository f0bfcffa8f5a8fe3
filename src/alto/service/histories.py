"""Cached histories of runs, rebuilt only if their journals have changed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from alto.runs import RunHistory, read_history

__all__ = ["Histories"]

_MOST_HISTORIES = 64
_MOST_FIGURES = 10_000

T = TypeVar("T")
_State: TypeAlias = tuple[int, int, int]


class Histories:
    """A cache of recent run histories, which callers must not change. Thread-safe."""

    def __init__(self) -> None:
        self._histories: _Lately[Path, RunHistory] = _Lately(_MOST_HISTORIES)
        self._figures: _Lately[tuple[Path, Hashable], object] = _Lately(_MOST_FIGURES)

    def read(self, run: Path) -> RunHistory:
        """Return the history of a run; an empty one if it has no journal yet.

        Raises:
            RunError: The journal is damaged.
        """
        state = _state_of(run)
        return RunHistory() if state is None else self._histories.get(run, state, lambda: read_history(run))

    def figures(self, run: Path, of: Hashable, make: Callable[[RunHistory], T]) -> T:
        """Return a few numbers of a run. Many more runs are cached here than histories, so long lists of runs are
        cheap.

        Args:
            run: Its folder.
            of: Anything else that the numbers depend on.
            make: Computes the numbers from the run's history; not called if the journal is unchanged.

        Raises:
            RunError: The journal is damaged.
        """
        state = _state_of(run)
        if state is None:
            return make(RunHistory())
        found: T = self._figures.get((run, of), state, lambda: make(self.read(run)))  # type: ignore[assignment]
        return found


K = TypeVar("K")


class _Lately(Generic[K, T]):
    """A cache of recent values, each with the state of the file that it was computed from."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[K, tuple[_State, T]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K, state: _State, make: Callable[[], T]) -> T:
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
        if known is None or known[0] != state:
            known = (state, make())
            with self._lock:
                self._known[key] = known
                self._known.move_to_end(key)
                while len(self._known) > self._most:
                    self._known.popitem(last=False)
        return known[1]


def _state_of(run: Path) -> _State | None:
    """Return a value that changes with the journal of a run; None if it has no journal yet."""
    try:
        found = (run / "journal.jsonl").stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
