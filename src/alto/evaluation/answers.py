"""The final answer of a worked solution in GSM8K's format: ``#### N`` on the last line."""

from __future__ import annotations

import re

from alto.data import Conversation

__all__ = ["final_answer", "final_number", "reply_position"]

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
