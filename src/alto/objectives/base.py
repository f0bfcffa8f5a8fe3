"""The interface of an objective: from the losses of the trained tokens to one loss per job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from alto.backbone import is_out_of_memory
from alto.data import EncodedDataset, TokenBatch
from alto.errors import DataError, UnsupportedError
from alto.spec import JobConfig
from alto.spec.method import Method
from alto.spec.objectives import OBJECTIVES
from alto.spec.packages import naming_errors

__all__ = ["Objective", "ObjectiveImplementation", "Terms"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The contributions of one micro-batch to the loss and the metrics of every job.

    Attributes:
        sums_J: ``[J]`` float64. Over all micro-batches of a batch they add up to the batch's loss times its weight.
        metrics: Name to ``[J]``, which add up in the same way; formed without a gradient.
        rows: Name to one number for each row of the batch, in order: the parts of which a metric, or the ``loss``, is
            the sum. With it, jobs can be compared row by row, and a lead can be distinguished from noise.
    """

    sums_J: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    rows: Mapping[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class ObjectiveImplementation(Protocol):
    """The computation of an objective. It is called after the base model has run, and sees only losses of tokens.

    One of your own: a class with these methods whose instances hold no state, named by an
    :class:`alto.spec.ObjectiveEntry` of your package. ``docs/objectives.md`` has one.

    Every job must be computed only from its own tokens, and in an order that depends only on them: then no other job
    changes its bits. :class:`alto.objectives.Pairs` and :func:`alto.objectives.run_sums` are made so.
    """

    def check(self, dataset: EncodedDataset, settings: Sequence[Any]) -> None:
        """Check, before anything is trained, that it can learn from such rows with such settings.

        Args:
            dataset: Encoded training or validation rows.
            settings: Settings of every job, of the class that the entry names.

        Raises:
            DataError: The rows are not pairs, or are pairs, against the objective's needs.
            SpecError: A setting is out of its domain.
        """
        ...

    def terms(self, losses_S: Tensor, batch: TokenBatch, settings: Sequence[Any]) -> Terms:
        """Loss and metrics of every job in ``batch``, not yet divided by ``batch.job_weights``.

        Args:
            losses_S: Cross-entropy of every trained token under the job's adapter, nats, float32.
            batch: Which tokens belong to which row and job.
            settings: One per job of the batch, of the class that the entry names.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """An objective: its description, which needs no torch, and its computation.

    Attributes:
        method: Its name and entry.
        implementation: Computes its loss.
    """

    method: Method
    implementation: ObjectiveImplementation

    @property
    def name(self) -> str:
        """Path of the class that computes the loss, for messages."""
        return type(self.implementation).__name__

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of its metrics: the keys of :attr:`Terms.metrics`."""
        return self.method.entry.metrics

    @property
    def scores(self) -> tuple[str, ...]:
        """The metrics that are better when higher; a task may select by one of them."""
        return self.method.entry.scores

    @property
    def needs_reference(self) -> bool:
        """Whether it needs reference log-probs (``batch.references_Q2``), which the frozen base computes once for all
        pairs."""
        return self.method.entry.needs_reference

    def check(self, dataset: EncodedDataset, configs: Sequence[JobConfig]) -> None:
        """Check, before anything is trained, that it can learn from such rows with such settings.

        Raises:
            DataError: The rows are of the other kind.
            SpecError: A setting is out of its domain.
            UnsupportedError: The implementation is a package's, and raises an error that is none of ALTO's.
        """
        if self.method.entry.is_labelled and dataset.labels is None:
            raise DataError(
                f"method {self.method.name}: expected replies with labels (columns prompt, completion and label) or "
                "preference pairs, found rows without labels; write method: sft"
            )
        expects_pairs = self.method.entry.is_paired or (self.needs_reference and not self.method.entry.is_labelled)
        if expects_pairs and not dataset.is_paired:
            raise DataError(
                f"method {self.method.name}: expected preference pairs (columns prompt, chosen and rejected), found "
                "rows with one reply; write method: sft, or name a dataset of pairs"
            )
        if self.method.entry.is_paired is False and dataset.is_paired:
            raise DataError(
                f"method {self.method.name}: expected rows that are conversations, found preference pairs; write "
                "method: dpo"
            )
        with self._naming_errors("check"):
            self.implementation.check(dataset, [config.objective for config in configs])

    def terms(self, losses_S: Tensor, batch: TokenBatch, configs: Sequence[JobConfig]) -> Terms:
        """Loss and metrics of every job in ``batch``; see :meth:`ObjectiveImplementation.terms`.

        Args:
            losses_S: Cross-entropy of every trained token, nats, float32.
            batch: Rows and jobs of the tokens.
            configs: One per job.

        Raises:
            UnsupportedError: The implementation is a package's, and raises or returns something else.
        """
        with self._naming_errors("terms"):
            terms = self.implementation.terms(losses_S, batch, [config.objective for config in configs])
        if not isinstance(terms, Terms):
            raise UnsupportedError(
                f"{self.name}.terms: expected an alto.objectives.Terms, found {type(terms).__name__}; correct its terms"
            )
        return terms

    def _naming_errors(self, method: str) -> AbstractContextManager[None]:
        """What a package's implementation raises is reported as its error; memory that runs out is not its error."""
        return naming_errors(
            f"{self.name}.{method}", type(self.implementation).__module__, page=OBJECTIVES.page, passes=is_out_of_memory
        )
