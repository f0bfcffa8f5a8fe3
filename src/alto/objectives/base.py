"""The interface of an objective: from the losses of the trained tokens to one loss per job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from alto.backbone import is_out_of_memory
from alto.data import EncodedDataset, TokenBatch
from alto.errors import DataError, UnsupportedError
from alto.records import LabelSet
from alto.spec import JobConfig
from alto.spec.method import Method
from alto.spec.objectives import OBJECTIVES
from alto.spec.packages import naming_errors

__all__ = ["DerivedMetrics", "Objective", "ObjectiveImplementation", "Terms"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The contributions of one micro-batch to the loss and the metrics of every job.

    Attributes:
        sums_J: ``[J]`` float64. Over all micro-batches of a batch they add up to the batch's loss times its weight.
        metrics: Name to ``[J]``, which add up in the same way; formed without a gradient.
        rows: Name to one number for each row of the batch, in order: the parts of which a metric, or the ``loss``, is
            the sum. With it, jobs can be compared row by row, and a lead can be distinguished from noise.
        statistics: ``[J, n]`` float64, which add up over micro-batches: of them :class:`DerivedMetrics` are made. None
            where there are none, and in training.
    """

    sums_J: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    statistics: Tensor | None = None

    def with_statistics(self, statistics: Tensor) -> Terms:
        """The same with ``statistics``."""
        return replace(self, statistics=statistics)


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
            losses_S: Cross-entropy of every trained token under the job's adapter, nats, float32; where the entry names
                ``problem_types``, instead the logits ``[Q, K]`` of the job's head for every row.
            batch: Which tokens belong to which row and job.
            settings: One per job of the batch, of the class that the entry names.
        """
        ...


@runtime_checkable
class DerivedMetrics(Protocol):
    """What an objective has beside :class:`ObjectiveImplementation` where its entry names ``derived`` metrics: those
    that are no means over rows, such as a correlation."""

    def num_statistics(self, labels: LabelSet) -> int:
        """``n``, how many sums over rows it needs (:attr:`Terms.statistics`)."""
        ...

    def derived_metrics(self, statistics: Sequence[float], num_rows: int, labels: LabelSet) -> Mapping[str, float]:
        """The derived metrics of a split by name.

        Args:
            statistics: The sums over all its rows.
            num_rows: Number of its rows.
            labels: The labels of its rows.
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
        """Names of its metrics."""
        return self.method.entry.metrics

    @property
    def mean_metrics(self) -> tuple[str, ...]:
        """Those of them that are means over rows: the keys of :attr:`Terms.metrics`."""
        return tuple(name for name in self.metrics if name not in self.method.entry.derived)

    @property
    def derived(self) -> DerivedMetrics | None:
        """Makes the others of sums; None where there are none."""
        if not self.method.entry.derived:
            return None
        assert isinstance(self.implementation, DerivedMetrics), "checked when it was found"
        return self.implementation

    @property
    def has_head(self) -> bool:
        """Whether every job trains a classification head of its own, whose logits the loss is of."""
        return bool(self.method.entry.problem_types)

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
        if self.has_head and dataset.classes is None:
            raise DataError(
                f"method {self.method.name}: expected texts with labels (columns text and label), found rows without "
                "labels; write method: sft"
            )
        with self._naming_errors("check"):
            self.implementation.check(dataset, [config.objective for config in configs])

    def terms(self, losses_S: Tensor, batch: TokenBatch, configs: Sequence[JobConfig]) -> Terms:
        """Loss and metrics of every job in ``batch``; see :meth:`ObjectiveImplementation.terms`.

        Args:
            losses_S: Cross-entropy of every trained token, nats, float32; or the logits of every row.
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
