"""Supervised fine-tuning: the mean cross-entropy of the trained tokens, per job, as Hugging Face models compute it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from alto.data import EncodedDataset, TokenBatch
from alto.errors import DataError
from alto.objectives.base import Terms
from alto.objectives.sums import run_sums
from alto.spec import JobConfig

__all__ = ["Sft"]


class Sft:
    """Nats per trained token."""

    metrics: tuple[str, ...] = ()
    scores: tuple[str, ...] = ()
    needs_reference = False

    def check(self, dataset: EncodedDataset, configs: Sequence[JobConfig]) -> None:
        if dataset.is_paired:
            raise DataError(
                "method sft: expected rows that are conversations, found preference pairs; write method: dpo"
            )

    def terms(self, losses_S: Tensor, batch: TokenBatch, configs: Sequence[JobConfig]) -> Terms:
        return Terms(sums_J=run_sums(losses_S, batch.job_targets))
