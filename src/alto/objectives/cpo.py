"""Contrastive preference optimisation (arXiv:2401.08417) and SimPO (arXiv:2405.14734): make the chosen reply more
probable than the rejected one, and learn it. They need no reference log-probs.

The losses have the names and values of TRL's ``CPOTrainer``: ``sigmoid`` and ``hinge`` compare log-probabilities of
replies, ``simpo`` and ``ipo`` their means per token. ``simpo`` with ``cpo_alpha: 0`` is the paper's SimPO.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import torch
from torch import Tensor
from torch.nn import functional as F

from alto.data import TokenBatch
from alto.objectives.base import ObjectiveImplementation, Terms
from alto.objectives.pairs import Pairs, preference_metrics
from alto.spec import CPO_LOSS_TYPES, CpoLossType, CpoSettings

_PER_TOKEN: tuple[CpoLossType, ...] = ("simpo", "ipo")
"""Loss types whose rewards are means over the tokens of a reply."""


class Cpo(ObjectiveImplementation):
    """A loss of ``beta`` times the difference of log-probs, plus ``cpo_alpha`` times the cross-entropy of the chosen
    replies; a reward is ``beta`` times a reply's log-prob."""

    def terms(self, losses_S: Tensor, batch: TokenBatch, settings: Sequence[CpoSettings]) -> Terms:
        pairs = Pairs.of(losses_S, batch)
        names = [of.loss_type for of in settings]
        beta_Q = pairs.of_jobs([of.beta for of in settings])
        is_per_token_Q1 = pairs.of_jobs([name in _PER_TOKEN for name in names])[:, None] > 0
        log_p_Q2 = pairs.log_probs_Q2 / torch.where(is_per_token_Q1, pairs.lengths_Q2, 1.0)
        margin_Q = log_p_Q2[:, 0] - log_p_Q2[:, 1]
        target_Q = pairs.of_jobs([of.target_margin if of.loss_type == "simpo" else 0.0 for of in settings])
        smoothing_Q = pairs.of_jobs([of.label_smoothing for of in settings])
        losses_Q = torch.zeros_like(beta_Q)
        for form in (name for name in CPO_LOSS_TYPES if name in names):
            is_asked_Q = pairs.of_jobs([name == form for name in names]) > 0
            losses_Q = torch.where(is_asked_Q, _pair_losses(form, margin_Q, beta_Q, target_Q, smoothing_Q), losses_Q)
        chosen_losses_Q = pairs.chosen_losses
        alpha_Q = pairs.of_jobs([of.cpo_alpha for of in settings])
        return pairs.terms(
            losses_Q + alpha_Q * chosen_losses_Q,
            {**preference_metrics(log_p_Q2.detach() * beta_Q[:, None]), "chosen_loss": chosen_losses_Q},
        )


def _pair_losses(form: CpoLossType, margin_Q: Tensor, beta_Q: Tensor, target_Q: Tensor, smoothing_Q: Tensor) -> Tensor:
    """Return the loss of every pair for one loss type, ``[Q]`` float64, without the chosen reply's cross-entropy.

    Args:
        margin_Q: Log-prob of the chosen reply minus that of the rejected one, nats.
        target_Q: Margin by which the chosen reply's reward should be higher.
        smoothing_Q: Assumed share of pairs in the wrong order.
    """
    match form:
        case "sigmoid" | "simpo":
            logit_Q = beta_Q * margin_Q - target_Q
            return -F.logsigmoid(logit_Q) * (1 - smoothing_Q) - F.logsigmoid(-logit_Q) * smoothing_Q
        case "hinge":
            return torch.relu(1 - beta_Q * margin_Q)
        case "ipo":
            return (margin_Q - 1 / (2 * beta_Q)) ** 2
    assert_never(form)
