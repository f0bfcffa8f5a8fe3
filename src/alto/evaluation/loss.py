"""Measurement of adapters on held-out rows without generation: the loss, and the preference between two replies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from alto.backbone import Backbone
from alto.data import EncodedDataset, JobRows, TokenBatch, collate, split_into_micro_batches
from alto.errors import NoResultError
from alto.lora import ServedAdapters
from alto.objectives import token_losses
from alto.objectives.sums import run_sums

__all__ = ["check_finite", "heldout_losses", "micro_batches", "reply_log_probs", "sequence_log_probs"]


def heldout_losses(
    backbone: Backbone,
    served: ServedAdapters,
    dataset: EncodedDataset,
    *,
    names: Sequence[str],
    max_tokens_per_pass: int,
    on_done: Callable[[int], None],
) -> list[float]:
    """Return the validation loss of each adapter, computed as in training: nats per trained token over all rows.

    Args:
        names: Names of the adapters in error messages.
        max_tokens_per_pass: Maximum number of tokens in a micro-batch.
        on_done: Called after every micro-batch with its number of rows; a row counts once per adapter.

    Raises:
        NoResultError: A loss is not a finite number.
    """
    totals = [0.0] * len(served)
    for batch, losses_S in micro_batches(backbone, served, dataset, max_tokens_per_pass, on_done):
        for slot, total in zip(batch.slots, run_sums(losses_S, batch.job_targets).tolist(), strict=True):
            totals[slot] += total
    losses = [total / dataset.num_trained_tokens for total in totals]
    check_finite(dict(zip(names, losses, strict=True)))
    return losses


def reply_log_probs(
    backbone: Backbone,
    served: ServedAdapters,
    dataset: EncodedDataset,
    *,
    names: Sequence[str],
    max_tokens_per_pass: int,
    on_done: Callable[[int], None],
) -> list[Tensor]:
    """Return each adapter's log-probabilities of the chosen and the rejected reply of every pair: ``[pairs, 2]``
    float64, nats.

    The arguments and errors are those of :func:`heldout_losses`.
    """
    found = sequence_log_probs(
        backbone, served, dataset, names=names, max_tokens_per_pass=max_tokens_per_pass, on_done=on_done
    )
    return [log_probs_S.view(-1, 2) for log_probs_S in found]


def sequence_log_probs(
    backbone: Backbone,
    served: ServedAdapters,
    dataset: EncodedDataset,
    *,
    names: Sequence[str],
    max_tokens_per_pass: int,
    on_done: Callable[[int], None],
) -> list[Tensor]:
    """Return each adapter's log-probability of the trained tokens of every sequence, float64, nats.

    A row has one sequence, a pair has two. The arguments and errors are those of :func:`heldout_losses`.
    """
    parts: list[list[Tensor]] = [[] for _ in range(len(served))]
    for batch, losses_S in micro_batches(backbone, served, dataset, max_tokens_per_pass, on_done):
        of_sequences = -run_sums(losses_S, batch.sequence_targets)
        for slot, of_slot in zip(batch.slots, of_sequences.split(batch.job_sequences), strict=True):
            parts[slot].append(of_slot)
    log_probs = [torch.cat(of_slot) for of_slot in parts]
    check_finite({name: float(of_slot.sum()) for name, of_slot in zip(names, log_probs, strict=True)})
    return log_probs


@torch.no_grad()
def micro_batches(
    backbone: Backbone,
    served: ServedAdapters,
    dataset: EncodedDataset,
    max_tokens_per_pass: int,
    on_done: Callable[[int], None],
    compute: Callable[[Backbone, TokenBatch], Tensor] = token_losses,
) -> Iterator[tuple[TokenBatch, Tensor]]:
    """Run every row with every adapter; yield each micro-batch and the result of ``compute`` for it."""
    rows, shares_beginnings = tuple(range(len(dataset))), backbone.shares_beginnings
    everything = [JobRows(dataset, slot, rows, shares_beginnings=shares_beginnings) for slot in range(len(served))]
    for jobs in split_into_micro_batches(
        everything, max_tokens_per_pass, split_jobs=True, is_padded=backbone.is_padded
    ):
        batch = collate(jobs, backbone.device)
        counts = dict(zip(batch.slots, batch.job_tokens, strict=True))
        with served.use(served.schedule([counts.get(slot, 0) for slot in range(len(served))])):
            found_S = compute(backbone, batch)
        yield batch, found_S
        on_done(sum(batch.job_rows))


def check_finite(values: Mapping[str, float]) -> None:
    """Check that the values of all adapters, by name, are finite.

    Raises:
        NoResultError: A value is not a finite number.
    """
    broken = [name for name, value in values.items() if not math.isfinite(value)]
    if broken:
        raise NoResultError(
            f"expected a finite held-out loss, found {values[broken[0]]} for {', '.join(broken)}; the weights of these "
            "adapters or of the base model are broken, or the base model's precision is too low; leave these adapters "
            "out"
        )
