"""The work of one training step: the jobs, and the rows that each of them trains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache

import torch

from alto import Task
from alto.data import DataOrder, EncodedDataset, JobRows, TaskData, TokenBatch, collate, split_into_micro_batches
from alto.spec import Job
from benchmarks.kernels.lengths import RowLength

__all__ = ["LEARNING_RATE", "Workload", "random_rows"]

LEARNING_RATE = 1e-4
_UNTRAINED = -100


class Workload:
    """Jobs that train together; job ``i`` has the ``i``-th rank and is in slot ``i``.

    Values that a step needs but that no system would compute again in each step, such as tasks and orders, are made
    once.

    Args:
        data: Rows of random tokens, from which every job draws its own.
        max_tokens_per_pass: Tokens of one forward and backward pass, for every variant that batches jobs.
    """

    def __init__(self, ranks: Sequence[int], data: TaskData, max_tokens_per_pass: int) -> None:
        self.ranks = tuple(ranks)
        self.data = data
        self.max_tokens_per_pass = max_tokens_per_pass
        self.task = cache(self._task)
        self.rows = cache(self._rows)

    def num_steps(self, batch_size: int) -> int:
        """Number of steps in which a job trains every row once."""
        return math.ceil(len(self.data.train) / batch_size)

    def jobs(self, batch_size: int) -> Sequence[Job]:
        return self.task(batch_size).jobs

    def batches(self, batch_size: int, device: torch.device) -> Iterator[TokenBatch]:
        """Return the passes of a step that batches all jobs."""
        work = [JobRows(self.data.train, slot, rows) for slot, rows in enumerate(self.rows(batch_size))]
        for jobs in split_into_micro_batches(work, self.max_tokens_per_pass):
            yield collate(jobs, device)

    def micro_batches(self, batch_size: int) -> int:
        """Number of these passes."""
        return sum(1 for _ in self.batches(batch_size, torch.device("cpu")))

    def examples(self) -> list[dict[str, list[int]]]:
        """Return all rows in the form of Transformers and PEFT: ``input_ids`` and ``labels``."""
        train = self.data.train
        return [
            {"input_ids": ids.tolist(), "labels": [_UNTRAINED, *targets[:-1].tolist()]}
            for ids, targets in zip(train.input_ids, train.targets, strict=True)
        ]

    def _task(self, batch_size: int) -> Task:
        """Return the jobs as a task, each with its own seed."""
        numbers = list(range(len(self.ranks)))
        return Task(
            model="random",
            dataset="random.jsonl",
            learning_rate=LEARNING_RATE,
            lora_alpha="2*r",
            per_device_train_batch_size=batch_size,
            num_train_epochs=1,
            lr_scheduler_type="constant",
            search_space={"paired": {"r": list(self.ranks), "seed": numbers}},
        )

    def _rows(self, batch_size: int, step: int = 0) -> list[tuple[int, ...]]:
        """Return the rows that each job trains in its first step, or in a later one."""
        return [
            tuple(DataOrder(len(self.data.train), batch_size, job.config.seed).rows_of_step(step))
            for job in self.jobs(batch_size)
        ]


def random_rows(lengths: Sequence[RowLength], vocab_size: int, seed: int = 0) -> TaskData:
    """Return rows of random tokens of these lengths; all tokens after the prompt are trained."""
    generator = torch.Generator().manual_seed(seed)
    input_ids, targets = [], []
    for length in lengths:
        ids = torch.randint(2, vocab_size, (length.total,), generator=generator)
        target = torch.full_like(ids, _UNTRAINED)
        target[length.prompt - 1 : -1] = ids[length.prompt :]
        input_ids.append(ids)
        targets.append(target)
    return TaskData(train=_dataset(input_ids, targets), validation=_dataset(input_ids[:1], targets[:1]))


def _dataset(input_ids: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> EncodedDataset:
    return EncodedDataset(input_ids=tuple(input_ids), targets=tuple(targets))
