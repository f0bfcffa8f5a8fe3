"""Waits for work that may hang, without hanging itself."""

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
    """Signal inside this package: the work was not done in time."""


def pause(seconds: float, on_turn: OnTurn) -> None:
    """Do nothing for ``seconds`` but call ``on_turn`` regularly."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        on_turn()
        time.sleep(min(_POLL_S, left))


def within(timeout_s: float, work: Callable[[], T], on_turn: OnTurn) -> T:
    """The result of ``work``, done in a thread of its own. A thread that is not done in time is left behind; it does
    not keep the process alive.

    Args:
        timeout_s: Seconds that it may take.
        work: Called once.
        on_turn: Called before, and regularly while the work is done; what it raises is raised.

    Raises:
        TooLateError: It is not done in time.
        BaseException: What ``work`` raises.
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
    """What a thread's work returned or raised."""

    def __init__(self) -> None:
        self.is_there = threading.Event()
        self._values: list[T] = []
        self._error: BaseException | None = None

    def fill(self, work: Callable[[], T]) -> None:
        try:
            self._values.append(work())
        except BaseException as error:  # sys.exit() in it too
            self._error = error
        finally:
            self.is_there.set()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._values[0]
