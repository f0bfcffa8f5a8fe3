"""Odds-ratio preference optimisation (arXiv:2403.07691): learns the chosen reply, and increases its odds relative to
the odds of the rejected one. Needs no reference log-probs.

Both terms are means over pairs of per-token means of a reply, as in the paper. Only replies are learned; TRL's trainer
also learns the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from alto.data import TokenBatch
from alto.objectives.base import ObjectiveImplementation, Terms
from alto.objectives.pairs import Pairs, preference_metrics
from alto.spec import OrpoSettings

_CERTAIN = -1e-9
"""Largest log-prob per token whose odds are finite enough to learn from."""


class Orpo(ObjectiveImplementation):
    """The loss ``-log p(chosen) - beta · log sigmoid(log odds(chosen) - log odds(rejected))`` with ``p`` per token."""

    def terms(self, losses_S: Tensor, batch: TokenBatch, settings: Sequence[OrpoSettings]) -> Terms:
        pairs = Pairs.of(losses_S, batch)
        log_p_Q2 = pairs.log_probs_Q2 / pairs.lengths_Q2
        log_odds_Q2 = log_p_Q2 - torch.log(-torch.expm1(log_p_Q2.clamp(max=_CERTAIN)))
        beta_Q = pairs.of_jobs([of.beta for of in settings])
        odds_Q = -F.logsigmoid(log_odds_Q2[:, 0] - log_odds_Q2[:, 1])
        rewards_Q2 = log_p_Q2.detach() * beta_Q[:, None]
        return pairs.terms(
            beta_Q * odds_Q - log_p_Q2[:, 0],
            {**preference_metrics(rewards_Q2), "chosen_loss": -log_p_Q2[:, 0]},
        )
