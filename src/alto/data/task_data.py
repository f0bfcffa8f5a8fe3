"""The data of a task: read, split and tokenised once, shared by all its jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from alto.data.encode import EncodedDataset, encode_dataset
from alto.data.formats import Conversation, read_conversations
from alto.data.split import sample_rows, split_rows
from alto.spec import Task

__all__ = ["TaskData", "count_training_rows", "load_task_data"]


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


def load_task_data(task: Task, tokenizer: Any) -> TaskData:
    """Read what ``task`` names and tokenise it with the base model's tokenizer.

    Raises:
        DataError: See :func:`read_conversations`, :func:`split_rows`, :func:`encode_dataset`.
    """
    training, validation = _split(task)
    return TaskData(
        train=encode_dataset(training, tokenizer, task.max_length, "training"),
        validation=encode_dataset(validation, tokenizer, task.max_length, "validation"),
    )


def count_training_rows(task: Task) -> int:
    """Rows that ``task`` would train on, before any is left out for having no trained token.

    Raises:
        DataError: See :func:`read_conversations`, :func:`split_rows`.
    """
    return len(_split(task)[0])


def _split(task: Task) -> tuple[list[Conversation], list[Conversation]]:
    rows = sample_rows(read_conversations(task.dataset), task.max_samples, task.data_seed)
    if task.validation_dataset is not None:
        return rows, read_conversations(task.validation_dataset)
    return split_rows(rows, task.validation_split, task.data_seed)
