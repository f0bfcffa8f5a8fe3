"""Lengths of GSM8K's rows as committed numbers, because a machine with a GPU may have neither the data nor a tokenizer.

``gsm8k_lengths.json`` has for each of two tokenizers ``[prompt tokens, all tokens]`` of the first 256 training rows in
file order. ``alto-tiny`` uses its chat template, where the last tokens of the prompt open the reply. ``gpt2`` is
GPT-2's byte-level BPE on question and answer alone, and stands for the tokenizers of larger models.
``tools/make_row_lengths.py`` makes the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

__all__ = ["FILE", "RowLength", "row_lengths"]

FILE = Path(__file__).with_name("gsm8k_lengths.json")


class RowLength(NamedTuple):
    """Tokens of one row: those of its prompt, which are not trained, and all of them."""

    prompt: int
    total: int


def row_lengths(tokenizer: str) -> tuple[RowLength, ...]:
    """Return the committed lengths under ``tokenizer``: ``"alto-tiny"`` or ``"gpt2"``."""
    return tuple(RowLength(*row) for row in json.loads(FILE.read_text(encoding="utf-8"))[tokenizer])
