"""Limits on the length and the token ids of a row, set by the task and the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alto.errors import ModelError
from alto.records import ModelLimits

__all__ = ["RowLimit", "check_token_ids", "row_limit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLimit:
    """The number of tokens at which rows are cut.

    Attributes:
        name: Description of the limit, for messages.
        remedy: Advice in case too much is cut.
    """

    num_tokens: int
    name: str
    remedy: str


def row_limit(max_length: int, limits: ModelLimits) -> RowLimit:
    """Return the smaller limit of the task's ``max_length`` and the model's positions."""
    positions = limits.max_positions
    if positions is None or max_length <= positions:
        return RowLimit(num_tokens=max_length, name=f"max_length {max_length}", remedy="raise max_length")
    return RowLimit(
        num_tokens=positions,
        name=f"the model's {positions} positions, which are fewer than max_length {max_length}",
        remedy="shorten the rows, or use a base model with more positions",
    )


def check_token_ids(ids: Sequence[int], limits: ModelLimits, tokenizer: Any, where: str) -> None:
    """Check that the model has an embedding for every token of a row.

    Args:
        tokenizer: Tokenizer that names the token in the message.
        where: The row, for messages.

    Raises:
        ModelError: A token has no embedding. (On a GPU, a missing embedding would end the process.)
    """
    largest = max(ids, default=-1)
    if limits.vocab_size is not None and largest >= limits.vocab_size:
        raise ModelError(
            f"model: expected token ids below the {limits.vocab_size:,} rows of its embedding, found {largest:,} "
            f"({tokenizer.convert_ids_to_tokens(largest)!r}) in {where}; use the tokenizer that the model was trained "
            "with, or give the embedding a trained row for every token (resize_token_embeddings) and save both"
        )
