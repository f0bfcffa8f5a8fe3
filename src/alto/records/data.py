"""Records about a task's rows before training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Segments: TypeAlias = tuple[tuple[str, bool], ...]
"""The parts of a text in order, with special tokens written out; each with a flag: whether its tokens are trained."""


UNREAD_COLUMNS = "Columns that nothing reads"
"""First words of the note that names such columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewExample:
    """One training row as the model sees it.

    Attributes:
        num_tokens: Number of tokens after truncation.
        segments: The row's text; for a pair, the common beginning of both conversations.
        chosen, rejected: The two continuations of a pair; empty for other rows.
        label: The row's label as text; empty if it has none.
    """

    num_tokens: int
    segments: Segments
    chosen: Segments = ()
    rejected: Segments = ()
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """The limits of a model's input; None if there is no limit or it is unknown.

    Attributes:
        max_positions: Maximum number of tokens of a sequence.
        vocab_size: Number of rows of the embedding; all token ids are below it.
        pad_token_id: The padding token of the model's configuration.
    """

    max_positions: int | None = None
    vocab_size: int | None = None
    pad_token_id: int | None = None


ProblemType: TypeAlias = Literal["single_label_classification", "multi_label_classification", "regression"]
"""The problem that a classification head learns, as transformers' configurations name it."""

RowLabel: TypeAlias = int | tuple[float, ...]
"""The label of a row: the index of its class; a 0 or 1 for every label; or the target numbers of a regression."""

LabelValue: TypeAlias = str | float | tuple[str, ...] | tuple[float, ...]
"""The label of a row as users write it: a name, several names, a number or several numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelSet:
    """The labels of a task's rows.

    Attributes:
        names: Names of the classification head's outputs, in order.
    """

    problem_type: ProblemType
    names: tuple[str, ...]

    @property
    def num_labels(self) -> int:
        return len(self.names)

    def value_of(self, label: RowLabel) -> LabelValue:
        """Return the label as users write it."""
        if isinstance(label, int):
            return self.names[label]
        if self.problem_type == "regression":
            return label[0] if len(label) == 1 else label
        return tuple(name for name, mark in zip(self.names, label, strict=True) if mark)

    def to_config(self) -> dict[str, Any]:
        """Return the arguments for transformers' ``AutoModelForSequenceClassification.from_pretrained`` and its
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
        dataset, model: Names as in the task; only the tokenizer of the model is used.
        form: The form of the rows, as given or as recognised by their columns.
        columns: The dataset's column for each role.
        max_length: Number of tokens at which rows are truncated.
        counts: Numbers of rows and tokens of both splits, and of truncated or skipped rows.
        row_tokens: Smallest, median and largest number of tokens of the training rows after truncation; each
            conversation of a pair counts.
        notes: Notices about the data and the model, as sentences.
        examples: The first training rows.
        num_read: Number of rows at the start of each dataset that were read, if there are more; counts, lengths and
            notes about the data are based on these. None if all rows were read.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSurvey:
    """A summary of a dataset, before there is a task for it.

    Attributes:
        num_rows: Number of rows to train and validate on.
        columns: Names of the columns of the first row that can be read.
        methods: ALTO's methods that learn from such rows, the most likely first; each with the form and the columns
            that it reads.
        has_validation, has_test: Whether the dataset has a validation or test split of its own.
    """

    num_rows: int
    columns: tuple[str, ...]
    methods: Mapping[str, str]
    has_validation: bool
    has_test: bool
