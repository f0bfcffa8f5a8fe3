"""Rows of a file become conversations.

Three forms are known: ``messages`` (a list of ``{role, content}``), ``prompt``/``completion`` and
``question``/``answer``; an optional ``system`` text goes first in the last two.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alto.errors import DataError, DataFileNotFoundError, DataFormatError

__all__ = ["Conversation", "Message", "read_conversations"]

_PAIRS = (("prompt", "completion"), ("question", "answer"))
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: ``role`` is ``system``, ``user`` or ``assistant``."""

    role: str
    content: str


Conversation = tuple[Message, ...]
"""Turns in order; at least one is the assistant's."""


def read_conversations(path: str | Path) -> list[Conversation]:
    """Every row of a ``.jsonl`` or ``.jsonl.gz`` file, in order.

    Raises:
        DataFileNotFoundError: There is no such file.
        DataFormatError: A line is not JSON, or has no form that is known; names file and line.
        DataError: The file holds no rows.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataFileNotFoundError(f"dataset: expected a file, found nothing at {path}; check the path")
    conversations = [_conversation(row, f"{path}:{number}") for number, row in _rows(path)]
    if not conversations:
        raise DataError(f"dataset: expected at least one row, found none in {path}; is it the right file?")
    return conversations


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise DataFormatError(
            f"dataset: expected a .jsonl or .jsonl.gz file (one JSON object a line), found {path.name}; convert it"
        )
    opener = gzip.open if path.name.endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8-sig") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _parse(line, f"{path}:{number}")
        except (UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
            raise DataFormatError(
                f"{path}: expected UTF-8 text, found something else ({error}); save it as UTF-8, or fetch it again"
            ) from error


def _parse(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise DataFormatError(
            f"{where}: expected one JSON object a line, found {line[:60]!r} ({error.msg}); write every row on one line"
        ) from error


def _conversation(row: Any, where: str) -> Conversation:
    if not isinstance(row, Mapping):
        raise DataFormatError(f"{where}: expected a JSON object, found {type(row).__name__}; name its columns")
    if "messages" in row:
        return _from_messages(row["messages"], where)
    for prompt_key, completion_key in _PAIRS:
        if prompt_key in row and completion_key in row:
            return _from_pair(row, prompt_key, completion_key, where)
    raise DataFormatError(
        f"{where}: expected the keys messages, prompt and completion, or question and answer; "
        f"found {', '.join(map(str, row)) or 'none'}; rename the columns"
    )


def _from_messages(messages: Any, where: str) -> Conversation:
    if not isinstance(messages, list) or not messages:
        raise DataFormatError(
            f"{where}: expected messages to be a list with at least one message, found {messages!r:.60}; "
            "correct the row"
        )
    turns = []
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        content = message.get("content") if isinstance(message, Mapping) else None
        if role not in _ROLES or not isinstance(content, str):
            raise DataFormatError(
                f"{where}: expected every message to have a role ({', '.join(_ROLES)}) and a content text, "
                f"found {message!r:.80}; correct the row"
            )
        turns.append(Message(role, content))
    if not any(turn.role == "assistant" for turn in turns):
        raise DataFormatError(f"{where}: expected at least one assistant message to train on, found none; add it")
    return tuple(turns)


def _from_pair(row: Mapping[str, Any], prompt_key: str, completion_key: str, where: str) -> Conversation:
    texts = {key: row[key] for key in ("system", prompt_key, completion_key) if row.get(key) is not None}
    for key in dict.fromkeys((prompt_key, completion_key, *texts)):
        if not isinstance(texts.get(key), str):
            raise DataFormatError(f"{where}: expected {key} to be a text, found {row[key]!r:.60}; correct the row")
    turns = [Message("user", texts[prompt_key]), Message("assistant", texts[completion_key])]
    if texts.get("system"):
        turns.insert(0, Message("system", texts["system"]))
    return tuple(turns)
