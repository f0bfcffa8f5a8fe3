"""The interface of scorers of generated answers."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from alto.data import Conversation
from alto.errors import AltoError

OnTurn = Callable[[], None]
"""A callback that is called regularly; an exception that it raises ends the scoring."""


class ScorerFailedError(Exception):
    """Raised inside this package when a scorer returns no scores; the message has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A row and the text that a model generated for it.

    Attributes:
        prompt: The text as the model saw it.
        reference: The row's own reply.
        answer: The generated text, without the end token.
    """

    prompt: str
    reference: str
    answer: str


class Scorer(Protocol):
    """The interface of scorers."""

    def __call__(self, answers: Sequence[Answer], on_turn: OnTurn) -> Sequence[float]:
        """Return a finite score for each of ``answers``, in the same order; higher is better.

        Args:
            on_turn: Called regularly; an exception that it raises ends the scoring.

        Raises:
            ScorerFailedError: The scorer returns no such scores.
        """
        ...


_MARK = "####"
_NUMBER = re.compile(r"-?(\d+(\.\d+)?|\.\d+)")
_THOUSANDS_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def final_answer(text: str) -> str | None:
    """Return the rest of the line after the last ``####`` in ``text``; None if there is none.

    Thousands separators, dollar signs, surrounding spaces and one final period are removed. Everything else is kept:
    ``18.0`` and ``18 eggs`` differ from ``18``.
    """
    _, mark, rest = text.rpartition(_MARK)
    if not mark:
        return None
    line = rest.lstrip(" ").partition("\n")[0]
    answer = line.replace("$", "").strip().removesuffix(".").strip()
    return _THOUSANDS_COMMA.sub("", answer) or None


def final_number(text: str) -> str | None:
    """Return the final answer of ``text`` as written (``18.0`` differs from ``18``); None if it is not a number."""
    answer = final_answer(text)
    return answer if answer is not None and _NUMBER.fullmatch(answer) else None


def reply_position(conversation: Conversation) -> int | None:
    """Return the index of the last trained reply, which is the reference; None if the row is plain text."""
    replies = [at for at, message in enumerate(conversation) if message.role == "assistant" and message.is_trained]
    return replies[-1] if replies else None


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
        on_turn: Called before the work starts and regularly while it runs; its exceptions are raised from here.

    Raises:
        TooLateError: ``work`` does not finish in time.
        BaseException: Any exception that ``work`` raises.
    """
    on_turn()
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # includes SystemExit
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True, name="alto-scorer").start()
    deadline = time.monotonic() + timeout_s
    while not wait([outcome], max(0.0, min(_POLL_S, deadline - time.monotonic()))).done:
        on_turn()
        if time.monotonic() >= deadline:
            raise TooLateError(f"no result within {timeout_s:g} s")
    return outcome.result()


_MAX_REASON_CHARS = 500


def attempted(work: Callable[[OnTurn], T], on_turn: OnTurn) -> tuple[T | None, str]:
    """Return the result of ``work``; or None, and in one line why it failed.

    Exceptions of ``on_turn``, which ``work`` calls, and errors of the accelerator are raised from here.
    """
    raised: BaseException | None = None

    def turn() -> None:
        nonlocal raised
        try:
            on_turn()
        except BaseException as error:
            raised = error
            raise

    try:
        return work(turn), ""
    except Exception as error:
        if error is raised or isinstance(error, torch.AcceleratorError):
            raise
        return None, _failure_text(error)


def _failure_text(error: Exception) -> str:
    text = str(error) if isinstance(error, AltoError | ScorerFailedError) else f"{type(error).__name__}: {error}"
    text = " ".join(text.split())
    return text if len(text) <= _MAX_REASON_CHARS else text[: _MAX_REASON_CHARS - 1] + "…"
