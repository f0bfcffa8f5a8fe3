"""What is known of a task's rows before training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["DataPreview", "ModelLimits", "PreviewExample", "Segments"]

Segments: TypeAlias = tuple[tuple[str, bool], ...]
"""A text in order, special tokens written out, each part with whether its tokens are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewExample:
    """One training row as the model sees it.

    Attributes:
        num_tokens: After it was cut.
        segments: Its text; of a pair, what both conversations begin with.
        chosen, rejected: How the conversations of a pair go on; nothing elsewhere.
    """

    num_tokens: int
    segments: Segments
    chosen: Segments = ()
    rejected: Segments = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What a model can be given; None where it sets no limit, or none is known.

    Attributes:
        max_positions: Tokens of a sequence.
        vocab_size: Rows of its embedding: token ids are below it.
    """

    max_positions: int | None = None
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPreview:
    """What a task's data is before anything is trained.

    Attributes:
        dataset, model: As the task names them; of the model only the tokenizer is used.
        form: The form of the rows that was named, or recognised by their columns.
        columns: Which column plays which role.
        max_length: Tokens at which rows are cut.
        counts: Rows and tokens of both splits, and what was cut or left out.
        row_tokens: Tokens of the training rows after cutting, of a pair those of either conversation: smallest, median,
            largest.
        notes: What a user should know about the data and the model, in sentences.
        examples: The first training rows.
    """

    dataset: str
    model: str
    form: str
    columns: Mapping[str, str]
    max_length: int
    counts: Mapping[str, int]
    row_tokens: tuple[int, float, int]
    notes: tuple[str, ...]
    examples: tuple[PreviewExample, ...]
