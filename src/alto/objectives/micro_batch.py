"""Runs one micro-batch through base model and objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from alto.backbone import Backbone
from alto.data import TokenBatch
from alto.errors import ShapeError
from alto.objectives.base import Objective, Terms, run_sums, to_device
from alto.objectives.pairs import tail_sums
from alto.spec import JobConfig


class Heads(Protocol):
    """The classification heads of all slots."""

    def logits(self, hidden_QH: Tensor, slots: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Return the logits ``[Q, K]`` of rows of jobs with the same number of labels; gradients of the heads are left
        in the bank.
        """
        ...


def token_losses(backbone: Backbone, batch: TokenBatch, logit_scales: Sequence[float] = ()) -> Tensor:
    """Return the cross-entropy of every trained token of ``batch``, ``[S]`` float32 nats.

    Args:
        logit_scales: Factor on the logits of every job; empty if all are 1.
    """
    return backbone.token_losses(read_states(backbone, batch, logit_scales), batch.loss_targets_S, batch)


def read_states(backbone: Backbone, batch: TokenBatch, logit_scales: Sequence[float] = ()) -> Tensor:
    """Return the hidden states that predict a trained token, or that a classification head reads, ``[S, H]``; scaled,
    so that the head's logits are ``logit_scales`` times as large (see :func:`token_losses`)."""
    hidden_TH = backbone.hidden_states(
        batch.input_ids_T, batch.position_ids_T, batch.sequence_lengths, batch.sequence_prefixes
    )
    states_SH = hidden_TH.index_select(0, batch.loss_positions_S)
    if all(scale == 1.0 for scale in logit_scales):
        return states_SH
    scales = [scale for scale, count in zip(logit_scales, batch.job_targets, strict=True) for _ in range(count)]
    return states_SH * to_device(scales, states_SH.device, states_SH.dtype)[:, None]


@dataclass(frozen=True, slots=True)
class Learners:
    """Consecutive jobs of a micro-batch that share an objective.

    Attributes:
        heads: Classification heads of the jobs, if the objective has heads.
    """

    objective: Objective
    configs: tuple[JobConfig, ...]
    heads: Heads | None = None


def micro_batch_terms(backbone: Backbone, batch: TokenBatch, learners: Sequence[Learners]) -> list[Terms]:
    """Return the contribution of ``batch`` to the loss of every job; for a dummy batch, one number that is not used.

    Args:
        batch: The micro-batch, with the jobs of ``learners`` in that order.
        learners: Groups of jobs; not read for a dummy batch.

    Returns:
        The terms of each group of ``learners``.

    Raises:
        ShapeError: An objective does not return one number per job (and in ``rows``, per row), or returns other metrics
            than it names; or, in training, sums without a gradient.
    """
    logit_scales = [config.objective.logit_scale for group in learners for config in group.configs]
    states_SH = read_states(backbone, batch, logit_scales if batch.slots else ())
    if not batch.slots:
        losses_S = backbone.token_losses(states_SH, batch.loss_targets_S, batch)
        return [Terms(sums_J=run_sums(losses_S, batch.job_targets))]
    has_head = any(group.objective.has_head for group in learners)
    token_losses_S = None if has_head else backbone.token_losses(states_SH, batch.loss_targets_S, batch)
    results, first, first_target = [], 0, 0
    for group in learners:
        last = first + len(group.configs)
        part = batch if len(learners) == 1 else batch.part(first, last)
        num_targets = sum(part.job_targets)
        targets = slice(first_target, first_target + num_targets)
        if token_losses_S is not None:
            outputs = token_losses_S[targets]
        elif group.objective.has_head:
            assert group.heads is not None, "the objective has heads"
            outputs = group.heads.logits(states_SH[targets], part.slots, part.job_rows)
        else:
            outputs = backbone.token_losses(states_SH[targets], part.loss_targets_S, part)
        results.append(terms_of(group.objective, outputs, part, group.configs))
        first, first_target = last, first_target + num_targets
    return results


def terms_of(objective: Objective, losses_S: Tensor, batch: TokenBatch, configs: Sequence[JobConfig]) -> Terms:
    """Return the contribution of a batch whose jobs share an objective.

    Args:
        losses_S: Cross-entropy of every trained token, nats, float32; or the logits of every row.
    """
    terms = objective.terms(losses_S, batch, configs)
    if torch.is_grad_enabled() and losses_S.requires_grad and not terms.sums_J.requires_grad:
        raise ShapeError(
            f"{objective.name}.terms: expected sums_J that are computed from losses_S, found some without a gradient; "
            "leave out what removes it, such as detach, item or no_grad"
        )
    wanted = dict.fromkeys(("loss", *objective.mean_metrics), (len(batch.slots),))
    found = {name: tuple(values_J.shape) for name, values_J in {"loss": terms.sums_J, **terms.metrics}.items()}
    if found != wanted:
        raise ShapeError(
            f"{objective.name}.terms: expected numbers per job {wanted}, found {found}; correct its terms, "
            "or the metrics that it names"
        )
    num_rows = (sum(batch.job_rows),)
    for name, values in terms.rows.items():
        if name not in wanted or tuple(values.shape) != num_rows:
            raise ShapeError(
                f"{objective.name}.terms: expected rows of the loss and its metrics with a number for each of "
                f"{num_rows[0]} rows, found {name!r} with {tuple(values.shape)}; correct its rows"
            )
    if objective.method.entry.has_row_losses and not torch.is_grad_enabled() and "loss" not in terms.rows:
        raise ShapeError(
            f"{objective.name}.terms: expected rows with 'loss', because the entry of {objective.method.name} says "
            f"has_row_losses, found {sorted(terms.rows)}; return the loss of every row, or remove has_row_losses"
        )
    return terms


def job_losses(backbone: Backbone, batch: TokenBatch, learners: Sequence[Learners]) -> Tensor:
    """Return the loss of every job, ``[J]`` float32; if a job's batch is split, the contribution of this micro-batch.

    The arguments are the same as for :func:`micro_batch_terms`."""
    sums_J = torch.cat([terms.sums_J for terms in micro_batch_terms(backbone, batch, learners)])
    return (sums_J / to_device(batch.job_weights, sums_J.device)).float()


def reference_sums(backbone: Backbone, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return log-probs under ``backbone``, and the part of them that comes from tokens beyond the length of the pair's
    shorter reply: both ``[Q, 2]`` float64 nats.

    The columns are the chosen and the rejected reply of every pair. For rows with one reply, the first column is this
    reply and the second is 0. For a dummy batch, the numbers are not used.
    """
    losses_S = token_losses(backbone, batch)
    sums = -run_sums(losses_S, batch.sequence_targets)
    if not batch.slots:
        return sums.expand(2)[None], sums.expand(2)[None]
    if len(batch.sequence_targets) == sum(batch.job_rows):  # one sequence per row
        return F.pad(sums[:, None], (0, 1)), torch.zeros_like(sums)[:, None].expand(-1, 2)
    return sums.view(-1, 2), -tail_sums(losses_S, batch)
