"""Direct preference optimisation: of two replies to a prompt, the chosen one's log-ratio to the frozen base is to
exceed that of the rejected one.

The losses are those of TRL's ``DPOTrainer`` under the same names, per pair. But ``label_smoothing`` of ``sigmoid`` is
that of cDPO (arXiv:2305.18290, notes), which TRL's ``sigmoid`` does not follow. Sources: sigmoid arXiv:2305.18290, ipo
2310.12036 (per token, as TRL), hinge 2309.06657, robust 2403.00409, apo 2408.06266.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor
from torch.nn import functional as F

from alto.data import EncodedDataset, TokenBatch
from alto.objectives.base import Terms
from alto.objectives.pairs import Pairs, preference_metrics
from alto.spec.objectives import DpoSettings, LossType

__all__ = ["Dpo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _LogRatios:
    """Of all pairs of a micro-batch: the replies' log-ratios to the base, and the settings of their jobs; all ``[Q]``
    float64."""

    chosen_Q: Tensor
    rejected_Q: Tensor
    chosen_length_Q: Tensor
    rejected_length_Q: Tensor
    beta_Q: Tensor
    smoothing_Q: Tensor

    def margin(self) -> Tensor:
        """The chosen reply's log-ratio less the rejected one's."""
        return self.chosen_Q - self.rejected_Q

    def margin_per_token(self) -> Tensor:
        return self.chosen_Q / self.chosen_length_Q - self.rejected_Q / self.rejected_length_Q


def _pair_losses(form: LossType, log_ratios: _LogRatios) -> Tensor:
    """Loss of every pair in one form, ``[Q]`` float64."""
    beta_Q, smoothing_Q = log_ratios.beta_Q, log_ratios.smoothing_Q
    match form:
        case "sigmoid":
            logit_Q = beta_Q * log_ratios.margin()
            return -F.logsigmoid(logit_Q) * (1 - smoothing_Q) - F.logsigmoid(-logit_Q) * smoothing_Q
        case "sigmoid_norm":
            return -F.logsigmoid(beta_Q * log_ratios.margin_per_token())
        case "ipo":
            return (log_ratios.margin_per_token() - 1 / (2 * beta_Q)) ** 2
        case "hinge":
            return torch.relu(1 - beta_Q * log_ratios.margin())
        case "robust":
            logit_Q = beta_Q * log_ratios.margin()
            right_Q, wrong_Q = -F.logsigmoid(logit_Q), -F.logsigmoid(-logit_Q)
            return (right_Q * (1 - smoothing_Q) - wrong_Q * smoothing_Q) / (1 - 2 * smoothing_Q)
        case "apo_zero":
            return 1 - torch.sigmoid(beta_Q * log_ratios.chosen_Q) + torch.sigmoid(beta_Q * log_ratios.rejected_Q)
        case "apo_down":
            return torch.sigmoid(beta_Q * log_ratios.chosen_Q) + 1 - torch.sigmoid(beta_Q * log_ratios.margin())
    assert_never(form)


class Dpo:
    """The mean over pairs; a reward is ``beta`` times a reply's log-ratio to the base.

    ``kl`` is the mean log-ratio of both replies, nats: an estimate of how far the adapter has gone from the base, on
    replies that are the data's, not its own.
    """

    def check(self, dataset: EncodedDataset, settings: Sequence[DpoSettings]) -> None:
        pass  # every pair is valid

    def terms(self, losses_S: Tensor, batch: TokenBatch, settings: Sequence[DpoSettings]) -> Terms:
        assert batch.references_Q2 is not None, "reference log-probs have been computed"
        pairs = Pairs.of(losses_S, batch)
        log_ratios_Q2 = pairs.log_ratios(batch.references_Q2)
        log_ratios = _LogRatios(
            chosen_Q=log_ratios_Q2[:, 0],
            rejected_Q=log_ratios_Q2[:, 1],
            chosen_length_Q=pairs.lengths_Q2[:, 0],
            rejected_length_Q=pairs.lengths_Q2[:, 1],
            beta_Q=pairs.of_jobs([of.beta for of in settings]),
            smoothing_Q=pairs.of_jobs([of.label_smoothing for of in settings]),
        )
        rewards_Q2 = log_ratios_Q2.detach() * log_ratios.beta_Q[:, None]
        metrics = {**preference_metrics(rewards_Q2), "kl": log_ratios_Q2.detach().mean(1)}
        return pairs.terms(_losses(log_ratios, pairs, [of.loss_type for of in settings]), metrics)


def _losses(log_ratios: _LogRatios, pairs: Pairs, forms: Sequence[LossType]) -> Tensor:
    """Loss of every pair in its job's form. Each form is computed for all pairs, so that a pair keeps its place in the
    vector.

    Args:
        forms: One per job.
    """
    first, *others = dict.fromkeys(forms)
    losses_Q = _pair_losses(first, log_ratios)
    for form in others:
        is_asked_Q = pairs.of_jobs([name == form for name in forms]) > 0
        losses_Q = torch.where(is_asked_Q, _pair_losses(form, log_ratios), losses_Q)
    return losses_Q
