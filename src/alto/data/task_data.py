"""The data of a task: read, split and tokenised once, shared by all its jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from alto.data.encode import EncodedDataset, encode_dataset
from alto.data.formats import Conversation, read_conversations
from alto.data.split import sample_rows, split_rows
from alto.spec import Task

__all__ = ["TaskData", "TaskRows", "read_task_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskData:
    """Training and validation rows, tokenised."""

    train: EncodedDataset
    validation: EncodedDataset

    def counts(self) -> dict[str, int]:
        """Rows and tokens of both splits, and what was cut or left out."""
        return {
            f"{name}_{what}": count
            for name, split in (("train", self.train), ("validation", self.validation))
            for what, count in (
                ("rows", len(split)),
                ("tokens", split.num_tokens),
                ("trained_tokens", split.num_trained_tokens),
                ("truncated_rows", split.num_truncated),
                ("skipped_rows", split.num_skipped),
            )
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRows:
    """Training and validation rows as they were read; no tokenizer, so no base model, is needed for them."""

    train: list[Conversation]
    validation: list[Conversation]

    def encode(self, tokenizer: Any, max_length: int) -> TaskData:
        """Tokenise both splits, cutting rows at ``max_length`` tokens.

        Raises:
            DataError: See :func:`encode_dataset`.
        """
        return TaskData(
            train=encode_dataset(self.train, tokenizer, max_length, "training"),
            validation=encode_dataset(self.validation, tokenizer, max_length, "validation"),
        )


def read_task_rows(task: Task) -> TaskRows:
    """Read and split what ``task`` names.

    Raises:
        DataError: See :func:`read_conversations`, :func:`split_rows`.
    """
    rows = sample_rows(read_conversations(task.dataset), task.max_samples, task.data_seed)
    if task.validation_dataset is not None:
        return TaskRows(train=rows, validation=read_conversations(task.validation_dataset))
    train, validation = split_rows(rows, task.validation_split, task.data_seed)
    return TaskRows(train=train, validation=validation)
