"""The final answer of a worked solution, as GSM8K writes it: ``#### N`` in the solution's last line."""

from __future__ import annotations

import re
from collections.abc import Sequence

from alto.data import Conversation
from alto.errors import DataError

__all__ = ["final_answer", "has_final_answers", "reference_answers", "reply_position"]

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


def reply_position(conversation: Conversation) -> int | None:
    """The index of the last trained reply, which is the reference. None where a row is plain text."""
    replies = [at for at, message in enumerate(conversation) if message.role == "assistant" and message.is_trained]
    return replies[-1] if replies else None


def has_final_answers(conversations: Sequence[Conversation]) -> bool:
    """Whether every row's reference ends in a number after ``####``."""
    return all(_number(conversation) is not None for conversation in conversations)


def reference_answers(conversations: Sequence[Conversation]) -> list[str]:
    """The final answer of every row's reference.

    Raises:
        DataError: A reference has none.
    """
    answers = []
    for number, conversation in enumerate(conversations, start=1):
        answer = _number(conversation)
        if answer is None:
            raise DataError(
                f"expected every reference to end in a line '{_MARK} N', found none in row {number} of "
                f"{len(conversations)} ({_reference(conversation)[-60:]!r}); name other rows with --dataset"
            )
        answers.append(answer)
    return answers


def _reference(conversation: Conversation) -> str:
    position = reply_position(conversation)
    return "" if position is None else conversation[position].content


def _number(conversation: Conversation) -> str | None:
    answer = final_answer(_reference(conversation))
    return answer if answer is not None and _NUMBER.fullmatch(answer) else None
