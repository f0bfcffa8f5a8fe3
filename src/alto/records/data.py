"""Facts about a task's rows before training."""

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
        segments: Its text; of a pair, the common beginning of both conversations.
        chosen, rejected: The continuations of a pair's conversations; empty elsewhere.
    """

    num_tokens: int
    segments: Segments
    chosen: Segments = ()
    rejected: Segments = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """The limits of a model's input; None where it has no limit, or it is unknown.

    Attributes:
        max_positions: Tokens of a sequence.
        vocab_size: Rows of its embedding: token ids are below it.
    """

    max_positions: int | None = None
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPreview:
    """A summary of a task's data before anything is trained.

    Attributes:
        dataset, model: As the task names them; of the model only the tokenizer is used.
        form: The form of the rows that was named, or recognised by their columns.
        columns: The column of each role.
        max_length: Tokens at which rows are cut.
        counts: Rows and tokens of both splits, and what was cut or left out.
        row_tokens: Tokens of the training rows after cutting, of a pair those of either conversation: smallest, median,
            largest.
        notes: Notices about the data and the model, as sentences.
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
