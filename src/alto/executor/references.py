"""Reference log-probs: log-probabilities of every reply in the data under the frozen base model, or under the adapter
that jobs begin with. They are computed once, shared by all jobs, and cached for later tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alto.data import EncodedDataset, JobRows, TaskData, collate, digest_of, dummy_batch
from alto.errors import DeviceMemoryError, ModelError
from alto.executor import cache
from alto.executor.context import TaskContext
from alto.executor.forward_plan import divided
from alto.executor.micro_batches import MicroBatches, RowTooLargeError, watching
from alto.executor.start_adapter import Within, beginning_with
from alto.objectives import reference_sums
from alto.spec import LOAD_IN_4BIT

COLUMNS = 4
"""Numbers for every pair: the log-probs of both replies, and for each reply the part that comes from tokens beyond the
length of the shorter reply."""

PART_ROWS = 2048
"""Pairs that are computed and saved together. A later run does not recompute the parts that an interrupted run has
saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """The data with reference log-probs.

    Attributes:
        data: The task's data, whose rows have reference log-probs.
        is_cached: Whether an earlier task had computed all of them.
        duration_s: Duration of the computation in this run.
    """

    data: TaskData
    is_cached: bool
    duration_s: float


def find_references(
    context: TaskContext,
    micro_batches: MicroBatches,
    on_turn: Callable[[], None] = lambda: None,
    restore: Callable[[], None] = lambda: None,
) -> References:
    """Find the log-probabilities of every reply in a task's data under the starting point of its jobs: the base model,
    or the adapter on it that ``init_adapter`` names, as in TRL.

    The adapters of a bank are never active meanwhile. Each rank computes its share of the rows. The results are cached,
    except for a base model that was given as an object and that no name loads, because its fingerprint only samples its
    weights.

    Args:
        context: The task's context, equal on all ranks.
        micro_batches: Splits the rows into micro-batches that fit into memory.
        on_turn: Called before every micro-batch, on all ranks; an error that it raises ends the computation.
        restore: Puts the adapters of a bank back after the jobs' starting adapter has replaced them.

    Raises:
        DeviceMemoryError: A single pair does not fit into memory; or a micro-batch does not, and other ranks have
            already begun it.
        ModelError: The base model gives a reply a log-probability that is not finite.
    """
    ranks, data = context.ranks, context.data
    began = time.perf_counter()
    is_cached = True
    splits = []
    for split in data.splits:
        found = []
        for part in split.parts(PART_ROWS):
            key = _key(context, part)
            known = _known(key, len(part)) if ranks.is_first and context.base.is_loadable else None
            references = ranks.broadcast_tensor(known, (len(part), COLUMNS), torch.float64)
            if references is None:
                is_cached = False
                references = _computed(context, part, micro_batches, on_turn, restore)
                if ranks.is_first and context.base.is_loadable:
                    cache.save("references", key, references.tolist())
            found.append(references)
        sums, tails = torch.cat(found).split(2, dim=1)
        splits.append(split.with_references(sums.contiguous(), tails.contiguous()))
    return References(
        data=data.with_splits(splits),
        is_cached=is_cached,
        duration_s=time.perf_counter() - began,
    )


def _known(key: Mapping[str, Any], num_rows: int) -> Tensor | None:
    found = cache.load("references", key)
    if found is None:
        return None
    try:
        known = torch.tensor(found, dtype=torch.float64)
        if known.shape != (num_rows, COLUMNS) or not bool(known.isfinite().all()):
            raise ValueError(f"not {COLUMNS} finite numbers for each of {num_rows} pairs")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        cache.discard("references", key, error)
        return None
    return known


@torch.no_grad()
def _computed(
    context: TaskContext,
    dataset: EncodedDataset,
    micro_batches: MicroBatches,
    on_turn: Callable[[], None],
    restore: Callable[[], None],
) -> Tensor:
    backbone, ranks = context.backbone, context.ranks
    everything = JobRows(dataset, 0, tuple(range(len(dataset))))
    work, num_micro_batches = divided(everything, micro_batches, ranks)
    found: dict[int, Sequence[float]] = {}

    def compute(parts: Sequence[JobRows], within: Within) -> None:
        on_turn()
        with watching("evaluation"):
            batch = collate(parts, backbone.device) if parts else dummy_batch(backbone.device)
            with within(sum(batch.job_tokens)):
                log_probs = torch.cat(reference_sums(backbone, batch), dim=1).tolist()
        found.update(zip((row for part in parts for row in part.rows), log_probs, strict=bool(parts)))

    try:
        with beginning_with(context.start, backbone, restore) as within:
            micro_batches.run(
                work,
                lambda parts: compute(parts, within),
                forget=found.clear,
                split_jobs=True,
                num_micro_batches=num_micro_batches,
            )
    except RowTooLargeError as error:
        raise DeviceMemoryError(
            f"expected memory for the base model alone on a pair of {error.num_tokens:,} tokens, found less on "
            f"{backbone.device}; lower max_length, or {LOAD_IN_4BIT}"
        ) from error
    numbers = [number for row in range(len(dataset)) for number in found.get(row, (0.0,) * COLUMNS)]
    references = torch.tensor(ranks.sum(numbers), dtype=torch.float64).view(-1, COLUMNS)
    num_broken = int((~references.isfinite()).any(1).sum())
    if num_broken:
        raise ModelError(
            f"expected finite log-probabilities of every reply under the base model, found infinite or NaN ones in "
            f"{num_broken} of {len(dataset)} pairs; the model's weights are broken, or {backbone.dtype} is too narrow "
            "for it (dtype: float32)"
        )
    return references


def _key(context: TaskContext, dataset: EncodedDataset) -> dict[str, Any]:
    """Return everything that the log-probs depend on: the loaded files and precision of the base model, not the
    requested ones."""
    backbone = context.backbone
    return {
        "base": context.base.key() | {"id": backbone.path, "dtype": str(backbone.dtype)},
        "commit": getattr(backbone.model.config, "_commit_hash", None),
        "weights": cache.weights_of(context.base.id),
        "versions": cache.versions(),
        "device": backbone.device.type,
        "columns": COLUMNS,
        "data": digest_of(dataset),
        "tenant": context.task.tenant,  # a cache hit is reported, and must not reveal what another tenant has trained
        **({} if context.start is None else {"adapter": context.start.fact.fingerprint}),
    }
