"""Group relative policy optimisation: completions that the model sampled, weighted by their rewards.

A step trains on completions that its own weights sampled. So the ratio between the probabilities of the trained and of
the sampling model is one, nothing is clipped, and the loss has the gradient of advantage times log-probability.
Source: TRL 1.16, ``GRPOTrainer`` with ``num_iterations=1``; :mod:`alto.executor.rollouts` computes the advantages and
the factors of the four loss types.

Shapes: ``S`` trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from alto.data import IGNORED, EncodedDataset, TokenBatch
from alto.errors import DataError
from alto.objectives.base import ObjectiveImplementation, Terms, run_sums, to_device
from alto.objectives.pairs import LANES
from alto.spec import GrpoSettings


class Grpo(ObjectiveImplementation):
    """The sum over a row's tokens of ``-ratio * advantage + beta * ratio * kl``, times the row's factor.

    ``kl`` estimates the divergence from the base model: ``exp(d) - d - 1``, with ``d`` the log-probability under the
    base model minus that under the adapter.
    """

    def check(self, dataset: EncodedDataset, settings: Sequence[GrpoSettings]) -> None:
        if dataset.num_truncated:
            raise DataError(
                f"method grpo: expected rows that fit into max_length, because rewards compare with their replies, "
                f"found {dataset.num_truncated} that were cut; raise max_length, or remove them"
            )
        without_prompt = sum(int(targets[0]) != IGNORED for targets in dataset.targets)
        if without_prompt:
            raise DataError(
                f"method grpo: expected rows of a prompt and a reply, found {without_prompt} without a prompt (plain "
                "texts, or train_on: all); give rows with prompt and completion, or messages, and remove train_on"
            )

    def terms(self, losses_S: Tensor, batch: TokenBatch, settings: Sequence[GrpoSettings]) -> Terms:
        device, num_targets = losses_S.device, batch.sequence_targets
        row_advantages = to_device(batch.row_advantages, device, torch.float64)
        advantages_S, factors_S = row_advantages.repeat_interleave(to_device(num_targets, device), 0).unbind(1)
        log_probs_S = -losses_S.double()
        ratios_S = 1.0 + (log_probs_S - log_probs_S.detach())  # the value and the gradient of exp(0)
        terms_S = -ratios_S * advantages_S
        betas = [of_job.beta for of_job in settings]
        if any(betas):
            assert batch.reference_losses_S is not None, "a term of the trainer computes it"
            betas_S = to_device(betas, device, torch.float64).repeat_interleave(to_device(batch.job_targets, device))
            differences_S = -batch.reference_losses_S.double() - log_probs_S
            terms_S = terms_S + betas_S * ratios_S * (_exp(differences_S) - differences_S - 1.0)
        terms_S = terms_S * factors_S
        sums_J, metrics = run_sums(terms_S, batch.job_targets), _no_metrics(batch, device)
        if torch.is_grad_enabled():
            return Terms(sums_J=sums_J, metrics=metrics)
        return Terms(sums_J=sums_J, metrics=metrics, rows={"loss": run_sums(terms_S, num_targets)})


def _exp(values_S: Tensor) -> Tensor:
    """Return the exponentials; the bits of each do not depend on its position."""
    return F.pad(values_S, (0, -len(values_S) % LANES)).exp()[: len(values_S)]


def _no_metrics(batch: TokenBatch, device: torch.device) -> dict[str, Tensor]:
    """Return zeros for the metrics, which are measured on sampled completions and not in the loss."""
    zeros_J = torch.zeros(len(batch.slots), dtype=torch.float64, device=device)
    return dict.fromkeys(("reward", "completion_tokens", "truncated", "entropy"), zeros_J)
