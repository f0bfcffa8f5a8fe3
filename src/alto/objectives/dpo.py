"""Direct preference optimisation: of two replies to a prompt, the chosen one's log-ratio to the frozen base is to
exceed that of the rejected one.

The losses are those of TRL's ``DPOTrainer`` under the same names, per pair. But ``label_smoothing`` of ``sigmoid`` is
that of cDPO (arXiv:2305.18290, notes), which TRL's ``sigmoid`` passes over. Sources: sigmoid arXiv:2305.18290, ipo
2310.12036 (per token, as TRL), hinge 2309.06657, robust 2403.00409, apo 2408.06266.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from alto.data import EncodedDataset, TokenBatch
from alto.objectives.base import Terms
from alto.objectives.pairs import PREFERENCE_METRICS, PREFERENCE_SCORES, Pairs, check_pairs, preference_metrics
from alto.spec import JobConfig

__all__ = ["Dpo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _LogRatios:
    """Of all pairs of a pass: what the replies have gained on the base, and the settings of their jobs; all ``[Q]``
    float64."""

    chosen_Q: Tensor
    rejected_Q: Tensor
    chosen_length_Q: Tensor
    rejected_length_Q: Tensor
    beta_Q: Tensor
    smoothing_Q: Tensor

    def margin(self) -> Tensor:
        """How much more the chosen reply has gained."""
        return self.chosen_Q - self.rejected_Q

    def margin_per_token(self) -> Tensor:
        return self.chosen_Q / self.chosen_length_Q - self.rejected_Q / self.rejected_length_Q


def _sigmoid(log_ratios: _LogRatios) -> Tensor:
    logit_Q = log_ratios.beta_Q * log_ratios.margin()
    return -F.logsigmoid(logit_Q) * (1 - log_ratios.smoothing_Q) - F.logsigmoid(-logit_Q) * log_ratios.smoothing_Q


def _sigmoid_norm(log_ratios: _LogRatios) -> Tensor:
    return -F.logsigmoid(log_ratios.beta_Q * log_ratios.margin_per_token())


def _robust(log_ratios: _LogRatios) -> Tensor:
    logit_Q = log_ratios.beta_Q * log_ratios.margin()
    right_Q, wrong_Q = -F.logsigmoid(logit_Q), -F.logsigmoid(-logit_Q)
    return (right_Q * (1 - log_ratios.smoothing_Q) - wrong_Q * log_ratios.smoothing_Q) / (
        1 - 2 * log_ratios.smoothing_Q
    )


def _ipo(log_ratios: _LogRatios) -> Tensor:
    return (log_ratios.margin_per_token() - 1 / (2 * log_ratios.beta_Q)) ** 2


def _hinge(log_ratios: _LogRatios) -> Tensor:
    return torch.relu(1 - log_ratios.beta_Q * log_ratios.margin())


def _apo_zero(log_ratios: _LogRatios) -> Tensor:
    return (
        1
        - torch.sigmoid(log_ratios.beta_Q * log_ratios.chosen_Q)
        + torch.sigmoid(log_ratios.beta_Q * log_ratios.rejected_Q)
    )


def _apo_down(log_ratios: _LogRatios) -> Tensor:
    return (
        torch.sigmoid(log_ratios.beta_Q * log_ratios.chosen_Q)
        + 1
        - torch.sigmoid(log_ratios.beta_Q * log_ratios.margin())
    )


_LOSSES: Mapping[str, Callable[[_LogRatios], Tensor]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid_norm,
    "ipo": _ipo,
    "hinge": _hinge,
    "robust": _robust,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
}
"""The names that :data:`alto.spec.method.LOSS_TYPES` lists."""


class Dpo:
    """The mean over pairs; a reward is ``beta`` times what a reply has gained on the base.

    ``kl`` is the mean log-ratio of both replies, nats: an estimate of how far the adapter has gone from the base, on
    replies that are the data's, not its own.
    """

    metrics: tuple[str, ...] = (*PREFERENCE_METRICS, "kl")
    scores: tuple[str, ...] = PREFERENCE_SCORES
    needs_reference = True

    def check(self, dataset: EncodedDataset, configs: Sequence[JobConfig]) -> None:
        check_pairs(dataset, "dpo")

    def terms(self, losses_S: Tensor, batch: TokenBatch, configs: Sequence[JobConfig]) -> Terms:
        assert batch.references_Q2 is not None, "the base has been asked"
        pairs = Pairs.of(losses_S, batch)
        log_ratios_Q2 = pairs.gains_on(batch.references_Q2)
        log_ratios = _LogRatios(
            chosen_Q=log_ratios_Q2[:, 0],
            rejected_Q=log_ratios_Q2[:, 1],
            chosen_length_Q=pairs.lengths_Q2[:, 0],
            rejected_length_Q=pairs.lengths_Q2[:, 1],
            beta_Q=pairs.of_jobs([config.beta for config in configs]),
            smoothing_Q=pairs.of_jobs([config.label_smoothing for config in configs]),
        )
        rewards_Q2 = log_ratios_Q2.detach() * log_ratios.beta_Q[:, None]
        metrics = {**preference_metrics(rewards_Q2), "kl": log_ratios_Q2.detach().mean(1)}
        return pairs.terms(_losses(log_ratios, pairs, configs), metrics)


def _losses(log_ratios: _LogRatios, pairs: Pairs, configs: Sequence[JobConfig]) -> Tensor:
    """Loss of every pair in the form that its job asks for: each form of all pairs, not of some, which would lie
    elsewhere in a vector."""
    forms = [_form(config) for config in configs]
    first, *others = dict.fromkeys(forms)
    losses_Q = _LOSSES[first](log_ratios)
    for form in others:
        is_asked_Q = pairs.of_jobs([name == form for name in forms]) > 0
        losses_Q = torch.where(is_asked_Q, _LOSSES[form](log_ratios), losses_Q)
    return losses_Q


def _form(config: JobConfig) -> str:
    assert config.loss_type is not None, "the task has filled in what its method needs"
    return config.loss_type
