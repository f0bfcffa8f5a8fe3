"""Supervised fine-tuning: the mean cross-entropy of the trained tokens, per job, as Hugging Face models compute it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alto.data import TokenBatch
from alto.objectives.base import ObjectiveImplementation, Terms, run_sums
from alto.spec import ObjectiveSettings


class Sft(ObjectiveImplementation):
    """The mean cross-entropy per trained token, in nats."""

    def terms(self, losses_S: Tensor, batch: TokenBatch, settings: Sequence[ObjectiveSettings]) -> Terms:
        sums_J = run_sums(losses_S, batch.job_targets)
        if torch.is_grad_enabled():  # training does not compare rows
            return Terms(sums_J=sums_J)
        return Terms(sums_J=sums_J, rows={"loss": run_sums(losses_S, batch.sequence_targets)})
