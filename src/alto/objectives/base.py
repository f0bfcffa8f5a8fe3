"""The interfaces of objectives, which turn the losses of trained tokens into one loss per job, and of the terms that
are added to this loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from alto.backbone import is_out_of_memory
from alto.base import described, load_attribute, naming_errors
from alto.data import EncodedDataset, JobRows, TokenBatch
from alto.errors import DataError, UnsupportedError
from alto.records import LabelSet
from alto.spec import OBJECTIVES, JobConfig, Method, find_method


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The contributions of one micro-batch to the loss and the metrics of every job.

    Attributes:
        sums_J: ``[J]`` float64. Summed over all micro-batches of a batch, they are the batch's loss times its weight.
        metrics: Name to ``[J]``, summed in the same way; computed without a gradient.
        rows: Name of a metric, or ``loss``, to one number for each row of the batch, in order; the metric is their sum.
            With them, jobs can be compared row by row, and a lead can be distinguished from noise. An evaluation needs
            ``loss`` if the entry says ``has_row_losses``.
        statistics: ``[J, n]`` float64, summed over micro-batches; :class:`DerivedMetrics` are computed from them. None
            if there are none, and in training.
    """

    sums_J: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    statistics: Tensor | None = None


@runtime_checkable
class ObjectiveImplementation(Protocol):
    """The computation of an objective. It is called after the base model has run, and sees only losses of tokens.

    To add an objective, write a class with these methods whose instances have no state, and name it in an
    :class:`alto.spec.ObjectiveEntry` of your package. ``docs/objectives.md`` has an example.

    Compute every job only from its own tokens, and in an order that depends only on them: then no other job changes its
    bits. :class:`alto.objectives.Pairs` and :func:`alto.objectives.run_sums` work this way.
    """

    def check(self, dataset: EncodedDataset, settings: Sequence[Any]) -> None:
        """Check, before training, that the objective can learn from these rows with these settings; by default it can.

        Args:
            dataset: Encoded training or validation rows.
            settings: Settings of every job, of the class that the entry names.

        Raises:
            DataError: The objective needs pairs and the rows are not pairs, or the reverse.
            SpecError: The value of a setting is not allowed.
        """
        ...

    def terms(self, losses_S: Tensor, batch: TokenBatch, settings: Sequence[Any]) -> Terms:
        """Return loss and metrics of every job in ``batch``, not yet divided by ``batch.job_weights``.

        Args:
            losses_S: Cross-entropy of every trained token under the job's adapter, nats, float32. If the entry names
                ``problem_types``, the logits ``[Q, K]`` of the job's head for every row instead.
            batch: Rows and jobs of the tokens.
            settings: One per job of the batch, of the class that the entry names.
        """
        ...


@runtime_checkable
class DerivedMetrics(Protocol):
    """The additional methods of an objective with ``derived`` metrics in its entry. Such metrics are not means over
    rows; an example is a correlation."""

    def num_statistics(self, labels: LabelSet) -> int:
        """Return ``n``, the number of sums over rows that the metrics need (:attr:`Terms.statistics`)."""
        ...

    def derived_metrics(self, statistics: Sequence[float], num_rows: int, labels: LabelSet) -> Mapping[str, float]:
        """Return the derived metrics of a split, by name.

        Args:
            statistics: The sums over all rows of the split.
            num_rows: Number of rows of the split.
            labels: Labels of the rows.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """An objective: its description, which needs no torch, and its computation."""

    method: Method
    implementation: ObjectiveImplementation

    @property
    def name(self) -> str:
        """Name of the class that computes the loss, for messages."""
        return type(self.implementation).__name__

    @property
    def mean_metrics(self) -> tuple[str, ...]:
        """The metrics that are means over rows: the keys of :attr:`Terms.metrics`."""
        return tuple(name for name in self.method.entry.metrics if name not in self.method.entry.derived)

    @property
    def derived(self) -> DerivedMetrics | None:
        """The implementation of the derived metrics; None if there are none."""
        if not self.method.entry.derived:
            return None
        assert isinstance(self.implementation, DerivedMetrics), "checked when it was found"
        return self.implementation

    @property
    def has_head(self) -> bool:
        """Whether every job trains its own classification head, from whose logits the loss is computed."""
        return bool(self.method.entry.problem_types)

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probs are needed (``batch.references_Q2``), which the frozen base model computes once
        for all pairs."""
        return self.method.entry.needs_reference

    def check(self, dataset: EncodedDataset, configs: Sequence[JobConfig]) -> None:
        """Check, before training, that the objective can learn from these rows with these settings."""
        if self.method.entry.is_labelled and dataset.labels is None:
            raise DataError(
                f"method {self.method.name}: expected replies with labels (columns prompt, completion and label) or "
                "preference pairs, but the dataset has no labels. Add a label column, or set method: sft"
            )
        expects_pairs = self.method.entry.is_paired or (self.needs_reference and not self.method.entry.is_labelled)
        if expects_pairs and not dataset.is_paired:
            raise DataError(
                f"method {self.method.name}: expected preference pairs (columns prompt, chosen and rejected), found "
                "rows with one reply; set method: sft, or use a dataset of pairs"
            )
        if self.method.entry.is_paired is False and dataset.is_paired:
            raise DataError(
                f"method {self.method.name}: expected rows that are conversations, found preference pairs; set "
                "method: dpo"
            )
        if self.has_head and dataset.classes is None:
            raise DataError(
                f"method {self.method.name}: expected texts with labels (columns text and label), found rows without "
                "labels; set method: sft"
            )
        with self._naming_errors("check"):
            self.implementation.check(dataset, [config.objective for config in configs])

    def terms(self, losses_S: Tensor, batch: TokenBatch, configs: Sequence[JobConfig]) -> Terms:
        """Return loss and metrics of every job in ``batch``; see :meth:`ObjectiveImplementation.terms`.

        Args:
            losses_S: Cross-entropy of every trained token, nats, float32; or the logits of every row.

        Raises:
            UnsupportedError: A package's implementation raises an error, or does not return :class:`Terms`.
        """
        with self._naming_errors("terms"):
            terms = self.implementation.terms(losses_S, batch, [config.objective for config in configs])
        if not isinstance(terms, Terms):
            raise UnsupportedError(
                f"{self.name}.terms: expected an alto.objectives.Terms, found {type(terms).__name__}; return one"
            )
        return terms

    def _naming_errors(self, method: str) -> AbstractContextManager[None]:
        """Name the package in an error of its implementation; an out-of-memory error stays as it is."""
        return naming_errors(
            f"{self.name}.{method}", type(self.implementation).__module__, page=OBJECTIVES.page, passes=is_out_of_memory
        )


def find_objective(name: str) -> Objective:
    """Find the objective of the method called ``name``.

    Raises:
        SpecError: There is no such method.
        UnsupportedError: Several packages register the method, or a package registers one of ALTO's own; or the
            implementation cannot be loaded or is not an objective.
    """
    OBJECTIVES.check_not_taken(name)
    method = find_method(name)
    path = method.entry.implementation
    try:
        implementation = load_attribute(path)()
    except Exception as error:
        raise UnsupportedError(
            f"method: expected {path}, the implementation of {name!r}, found that it cannot be loaded "
            f"({described(error, path.partition(':')[0])}); repair or remove the package that registers it"
        ) from error
    if not isinstance(implementation, ObjectiveImplementation):
        missing = sorted(member for member in ("check", "terms") if not hasattr(implementation, member))
        raise UnsupportedError(
            f"method: expected {path}, the implementation of {name!r}, to have check and terms, found it without "
            f"{', '.join(missing)}; add the methods that docs/objectives.md lists"
        )
    if method.entry.derived and not isinstance(implementation, DerivedMetrics):
        raise UnsupportedError(
            f"method: expected {path}, the implementation of {name!r}, to have num_statistics and derived_metrics for "
            f"{', '.join(method.entry.derived)}, found it without; add the methods that docs/objectives.md lists"
        )
    return Objective(method=method, implementation=implementation)


class AuxiliaryTerm:
    """A part of the loss of some jobs that depends on more than one micro-batch, such as a mean over a whole batch.

    One object serves one step, or one evaluation. The trainer treats all terms in the same way; a subclass
    overrides the methods that it needs.
    """

    def prepare(self) -> None:
        """Compute what must be known before the first micro-batch. Called before every attempt.

        Raises:
            RowTooLargeError: A single row does not fit into memory.
            DeviceMemoryError: A micro-batch does not fit, and other ranks have already begun it.
        """

    def completed(self, batch: TokenBatch, indices_J: Tensor) -> TokenBatch:
        """Return a micro-batch with the values that its objective reads.

        Args:
            indices_J: Index in the step of every job of ``batch``, on the device.
        """
        return batch

    def recording(self) -> AbstractContextManager[None]:
        """Return the context of a micro-batch's forward pass. It is not entered for a dummy batch."""
        return nullcontext()

    def losses(self, parts: Sequence[JobRows]) -> Tensor | None:
        """Return the loss to be trained in addition to the loss of the objective, for each job of the micro-batch whose
        forward pass was recorded last: ``[J]`` float32; None if this term has no loss.

        If a job's rows are in several micro-batches, its losses add up over them.
        """
        return None

    def forget(self) -> None:
        """Forget all micro-batches so far, because the work starts again."""

    def values(self) -> Sequence[float | None]:
        """Return the loss of every job of the step, without its factor; None for jobs without this loss. Called on all
        ranks, after the backward pass. The list is empty for a term without losses."""
        return ()


# Sums of runs of losses, each run by itself.
#
# Shapes: ``S`` trained tokens, ``R`` runs of them.


def run_sums(values_S: Tensor, lengths: Sequence[int]) -> Tensor:
    """Sum every run of ``values_S``, ``[R]`` float64, all runs in one launch.

    Each run is summed separately, in an order that depends only on its length, so its bits depend on no other run. The
    sums are in float64, because on a CPU they add one value after the other.
    """
    # `unsafe`: the lengths are valid, and checking them would synchronise host and device.
    return torch.segment_reduce(values_S.double(), "sum", lengths=to_device(lengths, values_S.device), unsafe=True)


def to_device(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor of ``numbers``, copied to ``device`` without synchronisation."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
