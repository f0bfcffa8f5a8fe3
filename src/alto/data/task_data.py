"""The tokenised rows of a task, shared by all its jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeAlias

from alto.data.dataset import EncodedDataset

__all__ = ["SPLITS", "EvaluationSplit", "TaskData"]

EvaluationSplit: TypeAlias = Literal["validation", "test"]
"""Rows that nothing is trained on."""

SPLITS = ("train", "validation", "test")
"""Names of the splits, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskData:
    """The rows of a task, tokenised.

    Attributes:
        train: Training rows.
        validation: Validation rows.
        test: Rows that nothing is trained on or selected by; None where there are none.
        num_shared: Validation rows that are training rows too.
        num_bad: Rows left out because they cannot be used.
        notes: Notices about the data, as sentences.
        form: Form of the training rows, of a mixture that of the first source; empty where it is not known.
        max_length: Tokens at which a row is cut; None where it is not known.
    """

    train: EncodedDataset
    validation: EncodedDataset
    test: EncodedDataset | None = None
    num_shared: int = 0
    num_bad: int = 0
    notes: tuple[str, ...] = ()
    form: str = ""
    max_length: int | None = None

    @property
    def splits(self) -> tuple[EncodedDataset, ...]:
        """Training, validation and, where there are some, test rows."""
        return (self.train, self.validation) if self.test is None else (self.train, self.validation, self.test)

    def held_out(self, split: EvaluationSplit) -> EncodedDataset:
        """The validation or the test rows, which there have to be."""
        dataset = self.validation if split == "validation" else self.test
        assert dataset is not None, "the task has no test rows"
        return dataset

    def with_splits(self, splits: Sequence[EncodedDataset]) -> Self:
        """The same data with other ``splits``, as many and in the same order."""
        train, validation, *rest = splits
        return replace(self, train=train, validation=validation, test=rest[0] if rest else None)

    def counts(self) -> dict[str, int]:
        """Rows and tokens of every split, what was cut or left out, and the validation rows that are trained too."""
        counts = {
            f"{name}_{what}": count
            for name, split in zip(SPLITS, self.splits, strict=False)
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
