"""Direct preference optimisation: of two replies to a prompt, the chosen one is to gain more on the frozen base than
the rejected one.

The losses are those of TRL's ``DPOTrainer`` under the same names, per pair; ``label_smoothing`` of ``sigmoid`` is that
of cDPO. Sources: sigmoid arXiv:2305.18290, ipo 2310.12036 (per token, as TRL), hinge 2309.06657, robust 2403.00409,
apo 2408.06266.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from alto.data import EncodedDataset, TokenBatch
from alto.objectives.base import Terms
from alto.objectives.pairs import PREFERENCE_GAINS, PREFERENCE_METRICS, Pairs, check_pairs, preference_metrics
from alto.objectives.sums import to_device
from alto.spec import JobConfig

__all__ = ["Dpo"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Gains:
    """Of some pairs: what the replies have gained on the base, and the settings of their jobs. All ``[Q]`` float64."""

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

    def take(self, pairs: Tensor) -> _Gains:
        """Those of the pairs with these indices."""
        return _Gains(*(getattr(self, field.name).index_select(0, pairs) for field in fields(self)))


def _sigmoid(gains: _Gains) -> Tensor:
    logit_Q = gains.beta_Q * gains.margin()
    return -F.logsigmoid(logit_Q) * (1 - gains.smoothing_Q) - F.logsigmoid(-logit_Q) * gains.smoothing_Q


def _sigmoid_norm(gains: _Gains) -> Tensor:
    return -F.logsigmoid(gains.beta_Q * gains.margin_per_token())


def _robust(gains: _Gains) -> Tensor:
    logit_Q = gains.beta_Q * gains.margin()
    right_Q, wrong_Q = -F.logsigmoid(logit_Q), -F.logsigmoid(-logit_Q)
    return (right_Q * (1 - gains.smoothing_Q) - wrong_Q * gains.smoothing_Q) / (1 - 2 * gains.smoothing_Q)


def _ipo(gains: _Gains) -> Tensor:
    return (gains.margin_per_token() - 1 / (2 * gains.beta_Q)) ** 2


def _hinge(gains: _Gains) -> Tensor:
    return torch.relu(1 - gains.beta_Q * gains.margin())


def _apo_zero(gains: _Gains) -> Tensor:
    return 1 - torch.sigmoid(gains.beta_Q * gains.chosen_Q) + torch.sigmoid(gains.beta_Q * gains.rejected_Q)


def _apo_down(gains: _Gains) -> Tensor:
    return torch.sigmoid(gains.beta_Q * gains.chosen_Q) + 1 - torch.sigmoid(gains.beta_Q * gains.margin())


_LOSSES: Mapping[str, Callable[[_Gains], Tensor]] = {
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
    """The mean over pairs; a reward is ``beta`` times what a reply has gained on the base."""

    metrics: tuple[str, ...] = (*PREFERENCE_METRICS, "kl")
    gains: tuple[str, ...] = PREFERENCE_GAINS
    asks_base = True

    def check(self, dataset: EncodedDataset, configs: Sequence[JobConfig]) -> None:
        check_pairs(dataset, "dpo")

    def terms(self, losses_S: Tensor, batch: TokenBatch, configs: Sequence[JobConfig]) -> Terms:
        assert batch.references_Q2 is not None, "the base has been asked"
        pairs = Pairs.of(losses_S, batch)
        gains_Q2 = pairs.log_probs_Q2 - batch.references_Q2
        gains = _Gains(
            chosen_Q=gains_Q2[:, 0],
            rejected_Q=gains_Q2[:, 1],
            chosen_length_Q=pairs.lengths_Q2[:, 0],
            rejected_length_Q=pairs.lengths_Q2[:, 1],
            beta_Q=pairs.of_jobs([_set(config.beta) for config in configs]),
            smoothing_Q=pairs.of_jobs([_set(config.label_smoothing) for config in configs]),
        )
        rewards_Q2 = gains_Q2.detach() * gains.beta_Q[:, None]
        metrics = {**preference_metrics(rewards_Q2), "kl": gains_Q2.detach().mean(1)}
        return pairs.terms(_losses(gains, pairs.counts, configs), metrics)


def _losses(gains: _Gains, counts: Sequence[int], configs: Sequence[JobConfig]) -> Tensor:
    """Loss of every pair in the form that its job asks for; a launch per form, not per job."""
    types = [config.loss_type for config, count in zip(configs, counts, strict=True) for _ in range(count)]
    if len(set(types)) == 1:
        return _LOSSES[_set(types[0])](gains)
    losses_Q = torch.zeros_like(gains.chosen_Q)
    for name in dict.fromkeys(types):
        pairs = to_device([index for index, other in enumerate(types) if other == name], losses_Q.device)
        losses_Q = losses_Q.index_copy(0, pairs, _LOSSES[_set(name)](gains.take(pairs)))
    return losses_Q


def _set(value: T | None) -> T:
    assert value is not None, "the task has filled in what its method needs"
    return value
