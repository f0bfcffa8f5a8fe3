"""Sweeps in batches, as mLoRA (``loop``) and LoRAFusion (``lorafusion``) train them, on ALTO's backbone.

A fixed number of jobs trains at a time, each to its end. Choices in favour of the baselines: jobs that train together
have the same batch size, so that none waits for another or leaves a place empty; ``stacked`` describes how little is
stacked, padded or copied; nothing is written to disk.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import get_scheduler

from alto.backbone import Backbone
from alto.data import EncodedDataset, JobRows, collate, split_into_micro_batches
from alto.lora import adapter_scale, linear_modules
from alto.objectives import Learners, find_objective, job_losses
from alto.spec import Job
from benchmarks.baselines import loop, lorafusion
from benchmarks.baselines.job import IGNORED, BaselineJob, Evaluation, JobSettings, Prepared, epoch_order
from benchmarks.baselines.stacked import AfterBase, JobTokens, Products, StackedAdapters, share
from benchmarks.baselines.start import first_adapter

__all__ = ["WAYS", "train_in_batches"]

WAYS: Mapping[str, Products] = {"loop": AfterBase(loop), "lorafusion": lorafusion}


def train_in_batches(
    way: str,
    prepared: Prepared,
    jobs: Sequence[Job],
    *,
    at_once: int,
    eval_at_steps: Mapping[str, Sequence[int]],
    max_tokens: int = 4096,
) -> dict[str, BaselineJob]:
    """Train ``jobs``, ``at_once`` at a time.

    Args:
        way: Name in ``WAYS``.
        eval_at_steps: By job id, the steps after which the whole validation set is evaluated.
        max_tokens: Largest number of tokens of a micro-batch.

    Returns:
        Results by job id. Jobs that train together share their times, of which each gets its part.
    """
    found: dict[str, BaselineJob] = {}
    by_size: dict[int, list[Job]] = {}
    for job in jobs:
        by_size.setdefault(job.config.per_device_train_batch_size, []).append(job)
    for same in by_size.values():
        for first in range(0, len(same), at_once):
            together = same[first : first + at_once]
            residents = _Residents(WAYS[way], prepared, together, max_tokens)
            found |= residents.train({job.id: eval_at_steps[job.id] for job in together})
    return found


class _Residents:
    """Jobs of one batch size and length that train together from their first step to their last."""

    def __init__(self, products: Products, prepared: Prepared, jobs: Sequence[Job], max_tokens: int) -> None:
        self._began = time.perf_counter()
        self._jobs, self._max_tokens = jobs, max_tokens
        self._settings = [JobSettings.of(job.config.model_dump()) for job in jobs]
        for settings in self._settings:
            assert (settings.weight_decay, settings.max_grad_norm) == (0.0, 1.0), "as StackedAdapters has them"
        self._train, self._validation = _encoded(prepared.train), _encoded(prepared.validation)
        self._backbone = Backbone(share(prepared.model), prepared.tokenizer, str(prepared.model.name_or_path))
        starts = [first_adapter(self._backbone, job.config) for job in jobs]
        self._adapters = StackedAdapters(
            self._backbone.model,
            [module.name for module in linear_modules(self._backbone.model)],
            [settings.r for settings in self._settings],
            [settings.learning_rate for settings in self._settings],
            products,
        )
        for number, adapter in enumerate(starts):
            self._adapters.load(number, adapter)
        self._scales = [adapter_scale(job.config) for job in jobs]

    def train(self, eval_at_steps: Mapping[str, Sequence[int]]) -> dict[str, BaselineJob]:
        first = self._settings[0]
        total_steps = first.total_steps(len(self._train))
        steps = frozenset(eval_at_steps[self._jobs[0].id])
        assert all(frozenset(each) == steps for each in eval_at_steps.values()), "jobs of one length"
        scheduler = get_scheduler(
            first.scheduler,
            self._adapters.optimizer,
            num_warmup_steps=first.warmup_steps,
            num_training_steps=total_steps,
        )
        losses: list[list[float]] = []
        evaluations: list[list[Evaluation]] = [[] for _ in self._jobs]
        eval_s = 0.0
        samples = [0] * len(self._jobs)
        for step, rows_J in enumerate(self._rows(total_steps), start=1):
            samples = [count + len(rows) for count, rows in zip(samples, rows_J, strict=True)]
            losses.append(self._losses(self._train, rows_J, is_training=True))
            self._adapters.update()
            scheduler.step()
            if step in steps:
                began = time.perf_counter()
                whole = [tuple(range(len(self._validation)))] * len(self._jobs)
                with torch.no_grad():
                    found = self._losses(self._validation, whole, is_training=False)
                for own, loss in zip(evaluations, found, strict=True):
                    own.append(Evaluation(step, loss))
                eval_s += time.perf_counter() - began
        duration_s, number = time.perf_counter() - self._began, len(self._jobs)
        return {
            job.id: BaselineJob(
                duration_s=duration_s / number,
                train_s=(duration_s - eval_s) / number,
                eval_s=eval_s / number,
                train_losses=tuple(row[index] for row in losses),
                evaluations=tuple(evaluations[index]),
                samples=samples[index],
            )
            for index, job in enumerate(self._jobs)
        }

    def _rows(self, total_steps: int) -> Iterator[list[tuple[int, ...]]]:
        """Yield for every step the rows of every job."""
        size, count = self._settings[0].per_device_train_batch_size, len(self._train)
        per_epoch = math.ceil(count / size)
        orders = [epoch_order(count, settings.seed) for settings in self._settings]
        for step in range(total_steps):
            epoch, position = divmod(step, per_epoch)
            if position == 0:
                rows_of_epoch = [order(epoch) for order in orders]
            yield [tuple(rows[position * size : (position + 1) * size]) for rows in rows_of_epoch]

    def _losses(self, data: EncodedDataset, rows_J: Sequence[tuple[int, ...]], *, is_training: bool) -> list[float]:
        """Return the mean loss of every job over the trained tokens of its rows; add gradients if training."""
        work = [JobRows(data, job, rows) for job, rows in enumerate(rows_J)]
        slots, parts = list[int](), list[torch.Tensor]()
        for micro_batch in split_into_micro_batches(work, self._max_tokens):
            batch = collate(micro_batch, self._backbone.device)
            scales = tuple(self._scales[job] for job in batch.slots)
            with self._adapters.use(JobTokens(jobs=batch.slots, lengths=batch.job_tokens, scales=scales)):
                losses_J = job_losses(self._backbone, batch, [Learners(find_objective("sft"), ())])
                if is_training:
                    losses_J.sum().backward()
            slots += batch.slots
            parts.append(losses_J.detach())
        sums = [0.0] * len(self._jobs)
        for slot, loss in zip(slots, torch.cat(parts).tolist(), strict=True):
            sums[slot] += loss
        return sums


def _encoded(rows: Sequence[Mapping[str, Any]]) -> EncodedDataset:
    input_ids = tuple(torch.tensor(row["input_ids"]) for row in rows)
    targets = tuple(torch.tensor([*row["labels"][1:], IGNORED]) for row in rows)
    return EncodedDataset(input_ids=input_ids, targets=targets)
