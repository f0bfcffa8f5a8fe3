"""Counts the rows of a split that are also in another split."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable

from alto.data.conversation import Conversation, LabelledText, Pair, Row

__all__ = ["num_known"]

_DIGEST_BYTES = 16


def num_known(rows: Iterable[Row], among: Iterable[Row]) -> int:
    """Count the rows that are also in ``among``; only digests of ``rows`` are in memory, 128 bits each."""
    wanted = Counter(map(_digest, rows))
    return sum(wanted.pop(_digest(row), 0) for row in among) if wanted else 0


def _digest(row: Row) -> bytes:
    return hashlib.blake2b(json.dumps(_row_values(row)).encode(), digest_size=_DIGEST_BYTES).digest()


def _row_values(row: Row) -> list[object]:
    """Return the values that make two rows equal, as JSON values."""
    if isinstance(row, LabelledText):
        text = row.text if isinstance(row.text, str) else _values(row.text)
        return [text, row.text_pair, row.label]
    return [_values(conversation) for conversation in (row.conversations if isinstance(row, Pair) else (row,))]


def _values(conversation: Conversation) -> list[object]:
    """Return the values that make two conversations equal, as JSON values."""
    turns = [(turn.role, turn.content, turn.is_context, turn.extras) for turn in conversation]
    return [turns, getattr(conversation, "template_arguments", ""), getattr(conversation, "is_desirable", None)]
