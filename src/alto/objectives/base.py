"""What an objective is: from the losses of the trained tokens to one loss per job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from alto.data import EncodedDataset, TokenBatch
from alto.spec import JobConfig

__all__ = ["Objective", "Terms"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the rows of one pass add to the loss of every job, and to its metrics.

    Attributes:
        sums_J: ``[J]`` float64. Over all passes of a batch they add up to the batch's loss times its weight.
        metrics: Name to ``[J]``, which add up in the same way; formed without a gradient.
        rows: Name to one number for each row of the batch, in order: the parts of which a metric is the sum. Where it
            is there, jobs can be compared row by row, and a lead be told from noise.
    """

    sums_J: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    rows: Mapping[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class Objective(Protocol):
    """What is learned from a row. The base model has run when it is asked; it sees losses of tokens alone.

    An objective of your own: a class with these members whose instances hold no state, named in the entry-point group
    ``alto.objectives`` of your package (``my_method = "my_package:MyObjective"``); a task asks for it by that name with
    ``method: my_method``. ``docs/objectives.md`` has one.

    Every job is to be computed from its own tokens alone, and in an order that its own tokens decide: then nobody in
    its company changes it by a bit. :class:`alto.objectives.Pairs` and :func:`alto.objectives.run_sums` are made so.

    Attributes:
        metrics: Names of what it measures beside the loss: the keys of :attr:`Terms.metrics`.
        scores: Those of them of which more is better; a task may choose its winner by one.
        needs_reference: Whether it reads ``batch.references_Q2``, for which the frozen base runs over all pairs once.
    """

    metrics: tuple[str, ...]
    scores: tuple[str, ...]
    needs_reference: bool

    def check(self, dataset: EncodedDataset, configs: Sequence[JobConfig]) -> None:
        """Make sure, before anything is trained, that it can learn from such rows with such settings.

        Raises:
            DataError: The rows are no pairs, or are pairs.
            SpecError: A setting is out of its domain.
        """
        ...

    def terms(self, losses_S: Tensor, batch: TokenBatch, configs: Sequence[JobConfig]) -> Terms:
        """Loss and metrics of every job in ``batch``, not yet divided by ``batch.job_weights``.

        Args:
            losses_S: Cross-entropy of every trained token under the job's adapter, nats, float32.
            configs: One per job.
        """
        ...
