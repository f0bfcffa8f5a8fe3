"""Facts about a task's rows before training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

__all__ = ["DataPreview", "LabelSet", "ModelLimits", "PreviewExample", "ProblemType", "RowLabel", "Segments"]

Segments: TypeAlias = tuple[tuple[str, bool], ...]
"""A text in order, special tokens written out, each part with whether its tokens are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewExample:
    """One training row as the model sees it.

    Attributes:
        num_tokens: After it was cut.
        segments: Its text; of a pair, the common beginning of both conversations.
        chosen, rejected: The continuations of a pair's conversations; empty elsewhere.
        label: Its label as text; empty where it has none.
    """

    num_tokens: int
    segments: Segments
    chosen: Segments = ()
    rejected: Segments = ()
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """The limits of a model's input; None where it has no limit, or it is unknown.

    Attributes:
        max_positions: Tokens of a sequence.
        vocab_size: Rows of its embedding: token ids are below it.
        pad_token_id: The token that its configuration pads with.
    """

    max_positions: int | None = None
    vocab_size: int | None = None
    pad_token_id: int | None = None


ProblemType: TypeAlias = Literal["single_label_classification", "multi_label_classification", "regression"]
"""What a classification head learns, as the configurations of transformers name it."""

RowLabel: TypeAlias = int | tuple[float, ...]
"""The label of a row: the index of its class; a number, 0 or 1, for every label; or the numbers of a regression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelSet:
    """The labels of a task's rows.

    Attributes:
        problem_type: What is learned.
        names: Name of every output of a classification head, in order.
    """

    problem_type: ProblemType
    names: tuple[str, ...]

    @property
    def num_labels(self) -> int:
        return len(self.names)

    def to_config(self) -> dict[str, Any]:
        """The arguments of transformers' ``AutoModelForSequenceClassification.from_pretrained`` and of its
        configurations."""
        id2label = dict(enumerate(self.names))
        return {
            "num_labels": self.num_labels,
            "problem_type": self.problem_type,
            "id2label": id2label,
            "label2id": {name: index for index, name in id2label.items()},
        }


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
        num_read: Number of the first rows of each dataset that were read, where there are more: counts, lengths and
            notes about the data are of these; None where all rows were read.
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
    num_read: int | None = None
