"""Kahneman-Tversky optimisation (arXiv:2402.01306): every reply is labelled as desirable or not. The log-ratio of a
desirable reply to the frozen base model should exceed the divergence of the adapter from the base model; the log-ratio
of an undesirable reply should stay below it.

The losses are the same as in TRL's ``KTOTrainer``, under the same names. The divergence is estimated as in TRL: the
mean log-ratio of mismatched replies (each prompt of the batch with the reply of another row), or 0 if this mean is
negative. It has no gradient. It is computed on a job's whole batch, before the first of its micro-batches
(``batch.kl_J``). ``apo_zero_unpaired`` (arXiv:2408.06266) compares with 0 instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alto.data import EncodedDataset, TokenBatch
from alto.errors import DataError
from alto.objectives.base import ObjectiveImplementation, Terms, run_sums
from alto.objectives.pairs import filled, of_jobs, terms_of_rows
from alto.spec import KtoSettings


class Kto(ObjectiveImplementation):
    """The mean loss over rows; a reward is ``beta`` times a reply's log-ratio to the base model.

    ``chosen_reward`` and ``rejected_reward`` are means over the desirable and over the undesirable rows; ``kl`` is the
    estimated divergence, nats.
    """

    def check(self, dataset: EncodedDataset, settings: Sequence[KtoSettings]) -> None:
        assert dataset.labels is not None, "the objective's entry asks for labels"
        num_desirable = sum(dataset.labels)
        if num_desirable in (0, len(dataset)):
            found = "desirable" if num_desirable else "undesirable"
            raise DataError(
                f"method kto: expected both desirable and undesirable replies, found {len(dataset)} that are all "
                f"{found}; add rows of the other kind, raise validation_split, or set method: sft"
            )

    def terms(self, losses_S: Tensor, batch: TokenBatch, settings: Sequence[KtoSettings]) -> Terms:
        assert batch.references_Q2 is not None, "reference log-probs have been computed"
        counts = batch.job_rows
        log_probs_Q1 = -run_sums(losses_S, batch.sequence_targets)[:, None]
        log_ratios_Q = filled(log_probs_Q1 - batch.references_Q2[:, :1])[:, 0]

        def repeated(values: Sequence[float]) -> Tensor:
            return of_jobs(values, counts, log_ratios_Q)

        is_desirable_Q = of_jobs(batch.row_labels, (1,) * sum(counts), log_ratios_Q) > 0
        beta_Q = repeated([of.beta for of in settings])
        kl_Q = _kl(batch, settings, log_ratios_Q)
        signs_Q = torch.where(is_desirable_Q, 1.0, -1.0)
        weights_Q = torch.where(
            is_desirable_Q,
            repeated([of.desirable_weight for of in settings]),
            repeated([of.undesirable_weight for of in settings]),
        )
        losses_Q = weights_Q * (1 - torch.sigmoid(signs_Q * beta_Q * (log_ratios_Q - kl_Q)))
        # Weights for means over the rows of one label, because their sum is divided by the number of all rows.
        chosen_Q = repeated(
            [_mean_weight(all_, of) for all_, of in zip(batch.job_weights, batch.job_desirable, strict=True)]
        )
        rejected_Q = repeated(
            [_mean_weight(all_, all_ - of) for all_, of in zip(batch.job_weights, batch.job_desirable, strict=True)]
        )
        rewards_Q = beta_Q * log_ratios_Q.detach()
        metrics = {
            "chosen_reward": torch.where(is_desirable_Q, rewards_Q * chosen_Q, 0.0),
            "rejected_reward": torch.where(is_desirable_Q, 0.0, rewards_Q * rejected_Q),
        }
        metrics["reward_margin"] = metrics["chosen_reward"] - metrics["rejected_reward"]
        return terms_of_rows(losses_Q, {**metrics, "kl": kl_Q}, counts)


def _kl(batch: TokenBatch, settings: Sequence[KtoSettings], like_Q: Tensor) -> Tensor:
    """Return the divergence that each row is compared with, ``[Q]`` float64 nats."""
    if not any(of.needs_kl for of in settings):
        return torch.zeros_like(like_Q)
    assert batch.kl_J is not None, "the divergence of the whole batch has been estimated"
    indices_Q = of_jobs(range(len(batch.job_rows)), batch.job_rows, like_Q, fill=0).long()
    needs_kl_Q = of_jobs([of.needs_kl for of in settings], batch.job_rows, like_Q) > 0
    return torch.where(needs_kl_Q, batch.kl_J.index_select(0, indices_Q), 0.0)


def _mean_weight(num_rows: int, num_labelled: int) -> float:
    """Return the weight of a row in a mean over ``num_labelled`` rows that is later divided by ``num_rows``; 0 if there
    are no such rows."""
    return num_rows / num_labelled if num_labelled else 0.0
