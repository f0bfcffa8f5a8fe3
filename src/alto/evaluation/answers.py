"""The final answer of a worked solution, as GSM8K writes it: ``#### N`` in the solution's last line."""

from __future__ import annotations

import re

from alto.data import Conversation

__all__ = ["final_answer", "final_number", "reply_position"]

_MARK = "####"
_NUMBER = re.compile(r"-?(\d+(\.\d+)?|\.\d+)")
_THOUSANDS_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def final_answer(text: str) -> str | None:
    """The text after the last ``####`` of ``text`` on its line; None where there is none.

    Thousands commas, dollar signs, spaces around and one full stop at the end do not count; all else does, so that
    ``18.0`` and ``18 eggs`` are not ``18``.
    """
    _, mark, rest = text.rpartition(_MARK)
    if not mark:
        return None
    line = rest.lstrip(" ").partition("\n")[0]
    answer = line.replace("$", "").strip().removesuffix(".").strip()
    return _THOUSANDS_COMMA.sub("", answer) or None


def final_number(text: str) -> str | None:
    """The final answer of ``text`` where it is a number, as it is written: ``18.0`` is not ``18``."""
    answer = final_answer(text)
    return answer if answer is not None and _NUMBER.fullmatch(answer) else None


def reply_position(conversation: Conversation) -> int | None:
    """The index of the last trained reply, which is the reference. None where a row is plain text."""
    replies = [at for at, message in enumerate(conversation) if message.role == "assistant" and message.is_trained]
    return replies[-1] if replies else None
