"""Direct preference optimisation: the chosen reply should have a larger log-ratio to the frozen base model than the
rejected reply.

The losses have the names and values of TRL's ``DPOTrainer``, per pair; several are added with weights. One differs:
``sigmoid`` has the ``label_smoothing`` of cDPO (arXiv:2305.18290, notes), which TRL's ``sigmoid`` does not follow.
Sources: sigmoid arXiv:2305.18290, ipo 2310.12036 (per token, as TRL), hinge 2309.06657, robust 2403.00409, exo_pair
2402.00856, nca_pair 2402.05369, bco_pair 2404.04656 (without its running mean of rewards, as TRL), sppo_hard
2405.00675, apo 2408.06266, discopop 2406.08414; ``ld_alpha`` 2409.06411, ``f_divergence_type`` 2309.16240,
``rpo_alpha`` 2404.19733.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import assert_never

import torch
from torch import Tensor
from torch.nn import functional as F

from alto.data import TokenBatch
from alto.objectives.base import ObjectiveImplementation, Terms
from alto.objectives.pairs import Pairs, preference_metrics
from alto.spec import LOSS_TYPES, Divergence, DpoSettings, LossType

_MAX_EXPONENT = 80.0
"""Maximum exponent of the alpha divergence, as in TRL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scores:
    """Values of all pairs of a micro-batch, ``[Q]`` float64: the replies' log-ratios to the base model, their scores
    (the derivative of the divergence at that ratio), and the settings of their jobs."""

    chosen_ratio_Q: Tensor
    rejected_ratio_Q: Tensor
    chosen_score_Q: Tensor
    rejected_score_Q: Tensor
    chosen_length_Q: Tensor
    rejected_length_Q: Tensor
    chosen_loss_Q: Tensor
    beta_Q: Tensor
    smoothing_Q: Tensor
    tau_Q: Tensor

    def margin(self) -> Tensor:
        """Return the chosen reply's score minus the rejected one's."""
        return self.chosen_score_Q - self.rejected_score_Q

    def margin_per_token(self) -> Tensor:
        return self.chosen_score_Q / self.chosen_length_Q - self.rejected_score_Q / self.rejected_length_Q

    def where(self, is_asked_Q: Tensor) -> _Scores:
        """Return the values of the pairs that are asked for, and a harmless number for the others.

        A loss type may turn the values of other jobs into an infinite power, which must not reach their gradients."""
        harmless = torch.full_like(self.beta_Q, 0.5)
        return _Scores(
            **{field.name: torch.where(is_asked_Q, getattr(self, field.name), harmless) for field in fields(self)}
        )


def _pair_losses(form: LossType, of: _Scores) -> Tensor:
    """Return the loss of every pair for one loss type, ``[Q]`` float64."""
    beta_Q, smoothing_Q = of.beta_Q, of.smoothing_Q
    match form:
        case "sigmoid":
            logit_Q = beta_Q * of.margin()
            return -F.logsigmoid(logit_Q) * (1 - smoothing_Q) - F.logsigmoid(-logit_Q) * smoothing_Q
        case "sigmoid_norm":
            return -F.logsigmoid(beta_Q * of.margin_per_token())
        case "ipo":
            return (of.margin_per_token() - 1 / (2 * beta_Q)) ** 2
        case "hinge":
            return torch.relu(1 - beta_Q * of.margin())
        case "robust":
            logit_Q = beta_Q * of.margin()
            right_Q, wrong_Q = -F.logsigmoid(logit_Q), -F.logsigmoid(-logit_Q)
            return (right_Q * (1 - smoothing_Q) - wrong_Q * smoothing_Q) / (1 - 2 * smoothing_Q)
        case "exo_pair":
            logit_Q = beta_Q * of.margin()
            right_Q = torch.sigmoid(logit_Q) * (F.logsigmoid(logit_Q) - torch.log1p(-smoothing_Q))
            return right_Q + torch.sigmoid(-logit_Q) * (F.logsigmoid(-logit_Q) - torch.log(smoothing_Q))
        case "nca_pair":
            chosen_Q, rejected_Q = beta_Q * of.chosen_ratio_Q, beta_Q * of.rejected_ratio_Q
            return -F.logsigmoid(chosen_Q) - 0.5 * F.logsigmoid(-chosen_Q) - 0.5 * F.logsigmoid(-rejected_Q)
        case "bco_pair":
            return -F.logsigmoid(beta_Q * of.chosen_ratio_Q) - F.logsigmoid(-beta_Q * of.rejected_ratio_Q)
        case "sppo_hard":
            return (of.chosen_ratio_Q - 0.5 / beta_Q) ** 2 + (of.rejected_ratio_Q + 0.5 / beta_Q) ** 2
        case "apo_zero":
            return 1 - torch.sigmoid(beta_Q * of.chosen_ratio_Q) + torch.sigmoid(beta_Q * of.rejected_ratio_Q)
        case "apo_down":
            margin_Q = beta_Q * (of.chosen_ratio_Q - of.rejected_ratio_Q)
            return torch.sigmoid(beta_Q * of.chosen_ratio_Q) + 1 - torch.sigmoid(margin_Q)
        case "discopop":
            logit_Q = beta_Q * of.margin()
            log_share_Q = F.logsigmoid(logit_Q / of.tau_Q)
            # Exponents are added before `exp`: the separate factors may be infinite and 0.
            return -F.logsigmoid(logit_Q) * (1 - torch.exp(log_share_Q)) + torch.exp(log_share_Q - logit_Q)
        case "sft":
            return of.chosen_loss_Q
    assert_never(form)


def _score(divergence: Divergence, log_ratios_Q2: Tensor, coefficient_Q: Tensor) -> Tensor:
    """Return the derivative of a divergence at the ratio of adapter to base, up to a constant: ``[Q, 2]`` float64."""
    match divergence:
        case "reverse_kl":
            return log_ratios_Q2
        case "forward_kl":
            return 1 - torch.exp(-log_ratios_Q2)
        case "js_divergence":
            return math.log(2) + F.logsigmoid(log_ratios_Q2)
        case "alpha_divergence":
            power_Q1 = (coefficient_Q - 1)[:, None]
            is_limit_Q1 = power_Q1.abs() < 1e-6  # the limit is reverse_kl
            power_Q1 = torch.where(is_limit_Q1, 1.0, power_Q1)
            scores_Q2 = torch.expm1((power_Q1 * log_ratios_Q2).clamp(max=_MAX_EXPONENT)) / power_Q1
            return torch.where(is_limit_Q1, log_ratios_Q2, scores_Q2)
    assert_never(divergence)


class Dpo(ObjectiveImplementation):
    """The mean loss over pairs; a reward is ``beta`` times a reply's log-ratio to the base model.

    ``kl`` is the mean log-ratio of both replies, nats: an estimate of how far the adapter is from the base model, on
    replies of the data, not its own.
    """

    def terms(self, losses_S: Tensor, batch: TokenBatch, settings: Sequence[DpoSettings]) -> Terms:
        assert batch.references_Q2 is not None, "reference log-probs have been computed"
        pairs = Pairs.of(losses_S, batch)
        log_ratios_Q2 = pairs.log_ratios(batch.references_Q2)
        if any(of.ld_alpha is not None for of in settings):
            log_ratios_Q2 = log_ratios_Q2 - _left_out(losses_S, batch, pairs, settings)
        scores_Q2 = _scores(log_ratios_Q2, pairs, settings)
        scores = _Scores(
            chosen_ratio_Q=log_ratios_Q2[:, 0],
            rejected_ratio_Q=log_ratios_Q2[:, 1],
            chosen_score_Q=scores_Q2[:, 0],
            rejected_score_Q=scores_Q2[:, 1],
            chosen_length_Q=pairs.lengths_Q2[:, 0],
            rejected_length_Q=pairs.lengths_Q2[:, 1],
            chosen_loss_Q=pairs.chosen_losses,
            beta_Q=pairs.of_jobs([of.beta for of in settings]),
            smoothing_Q=pairs.of_jobs([of.label_smoothing for of in settings]),
            tau_Q=pairs.of_jobs([of.discopop_tau for of in settings]),
        )
        rewards_Q2 = log_ratios_Q2.detach() * scores.beta_Q[:, None]
        metrics = {**preference_metrics(rewards_Q2), "kl": log_ratios_Q2.detach().mean(1)}
        return pairs.terms(_losses(scores, pairs, [of.forms for of in settings]), metrics)


def _left_out(losses_S: Tensor, batch: TokenBatch, pairs: Pairs, settings: Sequence[DpoSettings]) -> Tensor:
    """Return the part that ``ld_alpha`` removes from the log-ratios, ``[Q, 2]`` float64.

    It is the log-ratio of the tokens beyond the shorter reply's length, times ``1 - ld_alpha``; 0 for jobs without
    ``ld_alpha``."""
    assert batch.reference_tails_Q2 is not None, "reference log-probs have been computed"
    tails_Q2 = pairs.tails(losses_S, batch, batch.reference_tails_Q2)
    share_Q1 = pairs.of_jobs([0.0 if of.ld_alpha is None else 1 - of.ld_alpha for of in settings])[:, None]
    return torch.where(share_Q1 > 0, share_Q1 * tails_Q2, 0.0)


def _scores(log_ratios_Q2: Tensor, pairs: Pairs, settings: Sequence[DpoSettings]) -> Tensor:
    """Return the scores of every pair under its job's divergence, ``[Q, 2]`` float64."""
    names = [of.f_divergence_type for of in settings]
    coefficient_Q = pairs.of_jobs([of.f_alpha_divergence_coef for of in settings])
    scores_Q2 = log_ratios_Q2
    for divergence in sorted(set(names) - {"reverse_kl"}):
        is_asked_Q1 = pairs.of_jobs([name == divergence for name in names])[:, None] > 0
        is_asked_Q1 = is_asked_Q1 & pairs.is_real[:, None]
        own_Q2 = torch.where(is_asked_Q1, log_ratios_Q2, 0.0)
        scores_Q2 = torch.where(is_asked_Q1, _score(divergence, own_Q2, coefficient_Q), scores_Q2)
    return scores_Q2


def _losses(scores: _Scores, pairs: Pairs, forms: Sequence[Mapping[LossType, float]]) -> Tensor:
    """Return the loss of every pair, the weighted sum of its job's loss types.

    Every loss type is computed for all pairs, so that a pair keeps its place in the vector, and in the same order for
    all jobs, so that no other job changes the order of a sum.
    """
    losses_Q = torch.zeros_like(scores.beta_Q)
    for form in LOSS_TYPES:
        if not any(form in of_job for of_job in forms):
            continue
        is_asked_Q = (pairs.of_jobs([form in of_job for of_job in forms]) > 0) & pairs.is_real
        weight_Q = pairs.of_jobs([of_job.get(form, 0.0) for of_job in forms])
        found_Q = weight_Q * _pair_losses(form, scores.where(is_asked_Q))
        losses_Q = losses_Q + torch.where(is_asked_Q, found_Q, 0.0)
    return losses_Q
