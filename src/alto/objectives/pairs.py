"""Common parts of objectives on preference pairs.

Shapes: ``Q`` pairs, ``J`` jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from alto.data import TokenBatch
from alto.objectives.base import Terms, run_sums, to_device

LANES = 16
"""Width of the float64 vectors in PyTorch's CPU kernels. Elements after the last whole vector are computed in another
way, which rounds a sigmoid differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """The pairs of one micro-batch, padded with dummy pairs to a whole number of vectors, so that element-wise results
    of a pair have the same bits at any position.

    Attributes:
        log_probs_Q2: Log-probs of the chosen and the rejected reply under the adapter, float64 nats.
        chosen_weights: For every job, the number of pairs of its whole batch, divided by the number of trained tokens
            in their chosen replies.
    """

    log_probs_Q2: Tensor
    lengths_Q2: Tensor
    counts: tuple[int, ...]
    chosen_weights: tuple[float, ...]

    @classmethod
    def of(cls, losses_S: Tensor, batch: TokenBatch) -> Pairs:
        """Return the pairs of ``batch``, whose trained tokens have ``losses_S``."""
        lengths_Q2 = to_device(batch.sequence_targets, losses_S.device, torch.float64).view(-1, 2)
        return cls(
            log_probs_Q2=filled(-run_sums(losses_S, batch.sequence_targets).view(-1, 2)),
            lengths_Q2=filled(lengths_Q2),
            counts=batch.job_rows,
            chosen_weights=tuple(
                weight / chosen for weight, chosen in zip(batch.job_weights, batch.job_chosen, strict=True)
            ),
        )

    @property
    def is_real(self) -> Tensor:
        """Whether each pair belongs to the micro-batch and is not a dummy: ``[Q]``."""
        return torch.arange(len(self.log_probs_Q2), device=self.log_probs_Q2.device) < sum(self.counts)

    @property
    def chosen_losses(self) -> Tensor:
        """A number for every pair, whose mean over the job's whole batch is the mean cross-entropy of all trained
        tokens of the chosen replies: ``[Q]`` float64 nats. Long replies count more, as in TRL's ``sft``."""
        return -self.log_probs_Q2[:, 0] * self.of_jobs(self.chosen_weights)

    def log_ratios(self, references_Q2: Tensor) -> Tensor:
        """Return the log-probs under the adapter minus those under the base model, ``references_Q2``: ``[Q, 2]``
        float64 nats."""
        return self.log_probs_Q2 - filled(references_Q2)

    def tails(self, losses_S: Tensor, batch: TokenBatch, reference_tails_Q2: Tensor) -> Tensor:
        """Return the part of the log-ratios that comes from tokens beyond the length of the pair's shorter reply:
        ``[Q, 2]`` float64 nats."""
        return filled(-tail_sums(losses_S, batch) - reference_tails_Q2)

    def of_jobs(self, values: Sequence[float]) -> Tensor:
        """Return one value per job, repeated for each of its pairs: ``[Q]`` float64."""
        return of_jobs(values, self.counts, self.log_probs_Q2)

    def terms(self, losses_Q: Tensor, metrics: Mapping[str, Tensor]) -> Terms:
        """Return the sums over every job's pairs."""
        return terms_of_rows(losses_Q, metrics, self.counts)


def of_jobs(values: Sequence[float], counts: Sequence[int], like_Q: Tensor, *, fill: float = 1.0) -> Tensor:
    """Return one value per job, repeated for each of its rows: ``[Q]`` float64.

    Args:
        fill: Value for dummy rows.
    """
    repeated: list[float] = []
    for value, count in zip(values, counts, strict=True):
        repeated += [value] * count
    repeated += [fill] * (len(like_Q) - len(repeated))
    return to_device(repeated, like_Q.device, torch.float64)


def terms_of_rows(losses_Q: Tensor, metrics: Mapping[str, Tensor], counts: Sequence[int]) -> Terms:
    """Return the sums over every job's rows; dummy rows after them are left out."""
    num_rows = sum(counts)
    rows = {"loss": losses_Q, **metrics}
    return Terms(
        sums_J=run_sums(losses_Q[:num_rows], counts),
        metrics={name: run_sums(values_Q.detach()[:num_rows], counts) for name, values_Q in metrics.items()},
        rows={name: values_Q.detach()[:num_rows] for name, values_Q in rows.items()},
    )


def tail_sums(losses_S: Tensor, batch: TokenBatch) -> Tensor:
    """Sum the losses of each reply beyond the length of the pair's shorter reply, ``[Q, 2]`` float64: one of the two is
    0."""
    runs: list[int] = []
    for chosen, rejected in zip(batch.sequence_targets[::2], batch.sequence_targets[1::2], strict=True):
        shared = min(chosen, rejected)
        runs += [shared, chosen - shared, shared, rejected - shared]
    return run_sums(losses_S, runs)[1::2].view(-1, 2)


def preference_metrics(rewards_Q2: Tensor) -> dict[str, Tensor]:
    """Return reward accuracy and margin: how often, and by how much, the chosen reply has the higher reward.

    Equal rewards count one half. The keys are :data:`alto.spec.PREFERENCE_METRICS`."""
    chosen_Q, rejected_Q = rewards_Q2.detach().unbind(1)
    return {
        "reward_accuracy": ((chosen_Q > rejected_Q).double() + (chosen_Q >= rejected_Q).double()) / 2,
        "reward_margin": chosen_Q - rejected_Q,
        "chosen_reward": chosen_Q,
        "rejected_reward": rejected_Q,
    }


def filled(values_Q2: Tensor) -> Tensor:
    """Return ``values_Q2``, padded with ones to a whole number of vectors."""
    return F.pad(values_Q2, (0, 0, 0, -len(values_Q2) % LANES), value=1.0)
