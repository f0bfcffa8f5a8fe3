"""The tokenised rows of a task, shared by all its jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeAlias

from alto.data.dataset import EncodedDataset, joined
from alto.data.notes import reading_notes
from alto.data.row_store import VIEWS

__all__ = ["SPLITS", "EvaluationSplit", "TaskData"]

EvaluationSplit: TypeAlias = Literal["validation", "test"]
"""A split that is not trained on."""

SPLITS = ("train", "validation", "test")
"""Names of the splits, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskData:
    """The rows of a task, tokenised.

    Attributes:
        validation: Validation rows; empty if a winner is trained again on all rows.
        test: Rows that are used neither for training nor for selection; None if there are none.
        num_shared: Number of validation rows that are also training rows.
        num_bad: Number of rows left out because they cannot be used.
        notes: Notices about the data, as sentences.
        form: Form of the training rows; for a mixture, that of the first source; empty if unknown.
        of_messages: Whether replies are lists of messages rather than texts.
        max_length: Number of tokens at which a row is cut; None if unknown.
    """

    train: EncodedDataset
    validation: EncodedDataset
    test: EncodedDataset | None = None
    num_shared: int = 0
    num_bad: int = 0
    notes: tuple[str, ...] = ()
    form: str = ""
    of_messages: bool = False
    max_length: int | None = None

    @property
    def splits(self) -> tuple[EncodedDataset, ...]:
        """The training, validation and test rows, without empty splits."""
        return tuple(self.named_splits.values())

    @property
    def named_splits(self) -> dict[str, EncodedDataset]:
        """The splits that have rows, by name, in the order of :data:`SPLITS`."""
        found = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: split for name, split in found.items() if split is not None and len(split)}

    @property
    def has_validation(self) -> bool:
        """Whether there are validation rows."""
        return len(self.validation) > 0

    def held_out(self, split: EvaluationSplit) -> EncodedDataset:
        """Return the validation or the test rows, which have to exist."""
        dataset = self.validation if split == "validation" else self.test
        assert dataset is not None, f"the task has no {split} rows"
        assert len(dataset), f"the task has no {split} rows"
        return dataset

    def with_splits(self, splits: Sequence[EncodedDataset]) -> Self:
        """Return the same data with other ``splits``, as many and in the same order."""
        named: dict[str, Any] = dict(zip(self.named_splits, splits, strict=True))
        return replace(self, **named)

    def with_all_rows(self) -> Self:
        """Return the same data with the validation rows behind the training rows, source by source, and no validation
        rows."""
        notes = reading_notes(len(self.validation), self.num_shared)
        return replace(
            self,
            train=_together(self.train, self.validation),
            validation=EncodedDataset(input_ids=(), targets=(), num_truncated=0, num_skipped=0),
            num_shared=0,
            notes=tuple(note for note in self.notes if note not in notes),
        )

    def counts(self) -> dict[str, int]:
        """Return the numbers of rows and tokens of every split, of rows cut or left out, and of shared rows."""
        counts = {
            f"{name}_{what}": count
            for name, split in self.named_splits.items()
            for what, count in (
                ("rows", len(split)),
                ("tokens", split.num_tokens),
                ("trained_tokens", split.num_trained_tokens),
                ("truncated_rows", split.num_truncated),
                ("skipped_rows", split.num_skipped),
                ("masked_rows", split.num_masked),
                ("unrolled_rows", split.num_unrolled),
                ("alike_rows", split.num_alike),
            )
        }
        return {**counts, "shared_rows": self.num_shared, "bad_rows": self.num_bad}


def _together(train: EncodedDataset, validation: EncodedDataset) -> EncodedDataset:
    """Concatenate both datasets; for a mixture, source by source."""
    if not train.sources:
        return joined([train, validation], store=VIEWS)
    parts: dict[str, list[EncodedDataset]] = {name: [] for name, _ in train.sources}
    for split in (train, validation):
        first = 0
        for name, count in split.sources:
            parts[name] += [split.rows(first, first + count)] if count else []
            first += count
        assert first == len(split), "every row is of a source"
    return joined([joined(of_source, store=VIEWS) for of_source in parts.values()], list(parts), VIEWS)
