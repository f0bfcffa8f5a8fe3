"""Prompts of held-out rows, for which models generate replies."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from alto.data import Conversation, LabelledText, Message, Pair, encode_prompt
from alto.errors import DataError

__all__ = ["Prompt", "prompt_of", "prompts_of", "reply_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The prompt of one row, and the row's own reply.

    Attributes:
        ids: Token ids up to the reply.
        reference: Text of the reply, with its tool calls (see :func:`reply_text`).
    """

    ids: tuple[int, ...]
    reference: str


def reply_text(reply: Message) -> str:
    """Return the text of a reply, followed by its tool calls, one per line as JSON with ``name`` and ``arguments``."""
    calls = [call["function"] for call in reply.other_keys().get("tool_calls", ())]
    lines = [
        json.dumps({"name": call["name"], "arguments": call["arguments"]}, ensure_ascii=False, default=str)
        for call in calls
    ]
    return "\n".join([*([reply.content] if reply.content.strip() else []), *lines])


def prompt_of(row: Conversation | Pair | LabelledText, tokenizer: Any) -> Prompt | None:
    """Return the turns before the last trained reply of ``row`` (for a pair, of its chosen side), encoded as a prompt.

    Returns:
        The prompt; None if the row is plain text or a labelled text, or if the reply has neither text nor a tool call.

    Raises:
        DataError: There is nothing before the reply, or the chat template refuses the turns.
    """
    if isinstance(row, LabelledText):
        return None
    turns = row.chosen if isinstance(row, Pair) else row
    position = max((at for at, turn in enumerate(turns) if turn.is_trained), default=None)
    if position is None or (position == 0 and turns[0].role == "text"):
        return None
    reference = reply_text(turns[position])
    if not reference:
        return None
    return Prompt(ids=tuple(encode_prompt(turns[:position], tokenizer)), reference=reference)


def prompts_of(rows: Iterable[Conversation | Pair | LabelledText], tokenizer: Any) -> list[Prompt]:
    """Return the prompt of every row.

    Raises:
        DataError: A row has no prompt.
    """
    prompts = []
    for number, row in enumerate(rows, start=1):
        try:
            prompt = prompt_of(row, tokenizer)
        except DataError as error:
            raise DataError(f"row {number}: {error}") from error
        if prompt is None:
            raise DataError(f"row {number}: expected a text reply after a prompt, found none; name other rows")
        prompts.append(prompt)
    return prompts
