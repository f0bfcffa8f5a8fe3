"""Timeouts for work that may hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from alto.evaluation.scorers import OnTurn

__all__ = ["TooLateError", "pause", "within"]

T = TypeVar("T")

_POLL_S = 0.05


class TooLateError(Exception):
    """Raised inside this package when work is not finished in time."""


def pause(seconds: float, on_turn: OnTurn) -> None:
    """Wait for ``seconds``, and call ``on_turn`` regularly meanwhile."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        on_turn()
        time.sleep(min(_POLL_S, left))


def within(timeout_s: float, work: Callable[[], T], on_turn: OnTurn) -> T:
    """Run ``work`` in its own thread, and return its result.

    A thread that is not finished in time keeps running as a daemon, which does not keep the process alive.

    Args:
        work: Called once.
        on_turn: Called before the work starts and regularly while it runs; its exceptions are raised from here.

    Raises:
        TooLateError: ``work`` does not finish in time.
        BaseException: Any exception that ``work`` raises.
    """
    on_turn()
    outcome = _Outcome[T]()
    threading.Thread(target=outcome.fill, args=(work,), daemon=True, name="alto-scorer").start()
    deadline = time.monotonic() + timeout_s
    while not outcome.is_there.wait(max(0.0, min(_POLL_S, deadline - time.monotonic()))):
        on_turn()
        if time.monotonic() >= deadline:
            raise TooLateError(f"no result within {timeout_s:g} s")
    return outcome.result()


class _Outcome(Generic[T]):
    """The return value or the exception of a thread's work."""

    def __init__(self) -> None:
        self.is_there = threading.Event()
        self._values: list[T] = []
        self._error: BaseException | None = None

    def fill(self, work: Callable[[], T]) -> None:
        try:
            self._values.append(work())
        except BaseException as error:  # includes SystemExit
            self._error = error
        finally:
            self.is_there.set()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._values[0]
