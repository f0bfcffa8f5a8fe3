"""The events of one job of a run.

Steps are optimizer steps of one job, counted from 1. Losses are means in nats per trained token; for pairs, in the unit
of their loss. Durations are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from alto.records import ExitReason, ShownAnswer
from alto.runs.events.facts import JobDescription, RunEvent, wire

_EVIDENCE = {"gain": "score", "cutoff_gain": "cutoff_score", "largest_pass": "largest_micro_batch"}
"""Names of exit evidence in version 0.1, with the current names."""

_REASONS = {"spreads": "data_parallel"}
"""Names of admission reasons in version 0.1, with the current names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SlotEntered(RunEvent):
    """A job enters a slot.

    Attributes:
        job: Job id.
        slot: Slot, numbered over all ranks; the first rank's slot if the job trains on several ranks.
        step: Steps done.
        reason: Why this job was chosen; empty if the journal does not have it.
        ranks: Ranks that train it; empty if there is only one.
    """

    job: str
    slot: int
    step: int = field(metadata=wire(if_absent=0))
    reason: str = field(metadata=wire(if_absent="", value_aliases=_REASONS))
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAdmitted(_SlotEntered):
    """A job enters a slot for the first time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResumed(_SlotEntered):
    """A parked job enters a slot again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSteps(RunEvent):
    """Training losses of consecutive steps of a job.

    Attributes:
        job: Job id.
        first_step: Step of the first loss.
        losses: Loss of each step, nats per token.
        router_losses: The routers' load-balancing loss at each of these steps. It is not included in ``losses`` and not
            multiplied by ``router_aux_loss_coef``; empty if the job trains without it.
        metrics: Means over the completions that a job with rewards sampled in each of these steps: ``reward``,
            ``completion_tokens`` (with the end token), ``truncated`` (share that did not end), ``entropy`` (nats per
            token) and ``equal_groups`` (share of prompts whose completions all have the same reward).
    """

    job: str
    first_step: int
    losses: tuple[float, ...]
    router_losses: tuple[float, ...] = ()
    metrics: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvaluated(RunEvent):
    """An evaluation of a job.

    Attributes:
        job: Job id.
        step: Steps done.
        total_steps: Steps of the job if nothing ends it early; None if the journal does not have it.
        train_ema: Exponentially smoothed training loss, nats per token.
        validation_loss: Loss on the validation rows, not smoothed, nats per token.
        is_best: Whether it is the best of the job so far; None if the journal does not have it.
        metrics: Metrics of the method other than the loss, by name.
        metric_rows: The task's metric on every validation row, in order; empty if the metric is the loss.
        loss_rows: Losses of single rows. If the task has an order of evaluation: those of the first rows in that order,
            as many as this evaluation used, with six significant digits. Otherwise: those of all validation rows, with
            four significant digits, and only at rungs, after the last step, and if this evaluation is the best of the
            job so far.
        test_loss: Loss on the test rows; None if it was not measured (the task's ``test_jobs``).
        test_rows: Loss of every test row, four significant digits; empty if ``test_loss`` is None.
        test_metrics: Metrics of the method on the test rows, by name; empty if ``test_loss`` is None.
        answers: Answers to the first three validation rows, if the job learns from rewards; else empty.
    """

    job: str
    step: int
    total_steps: int | None = field(metadata=wire(if_absent=None))
    train_ema: float = field(metadata=wire(if_absent=None))
    validation_loss: float = field(metadata=wire(if_absent=None))
    is_best: bool | None = field(metadata=wire(if_absent=None))
    metrics: Mapping[str, float] = field(default_factory=dict)
    metric_rows: tuple[float, ...] = ()
    loss_rows: tuple[float, ...] = ()
    test_loss: float | None = None
    test_rows: tuple[float, ...] = ()
    test_metrics: Mapping[str, float] = field(default_factory=dict)
    answers: tuple[ShownAnswer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BestMeasured(RunEvent):
    """A job's best adapter was measured at the end, on more validation rows than at its evaluation.

    Attributes:
        job: Job id.
        step: Step of its best evaluation.
        validation_loss: Loss on these rows, nats per token.
        metrics: Metrics of the method other than the loss, by name.
        loss_rows: Loss of each of these rows, the first in the order of evaluation, with six significant digits.
        test_loss: Loss on the test rows; None if it was not measured.
        test_rows: Loss of every test row, four significant digits; empty if ``test_loss`` is None.
        test_metrics: Metrics of the method on the test rows, by name; empty if ``test_loss`` is None.
    """

    job: str
    step: int
    validation_loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    loss_rows: tuple[float, ...] = ()
    test_loss: float | None = None
    test_rows: tuple[float, ...] = ()
    test_metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementFailed(RunEvent):
    """Held-out rows could not be measured: the validation rows before training or at the end (the job's earlier
    evaluation counts), or the test rows.

    Attributes:
        job: Id of the job whose best adapter was to be measured; empty for the starting point of all jobs.
        evidence: The reason, as for a job that exits as ``failed``: numbers or text by name.
        split: The rows: ``validation`` or ``test``.
    """

    job: str
    evidence: Mapping[str, float | str]
    split: Literal["validation", "test"] = "validation"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobParked(RunEvent):
    """A job leaves its slot; its state is kept and it will be resumed.

    Attributes:
        job: Job id.
        slot: Slot that it left; None if the journal does not have it.
        step: Steps done; None if the journal does not have it.
        reason: Why it was parked; empty if the journal does not have it.
    """

    job: str
    slot: int | None = field(metadata=wire(if_absent=None))
    step: int | None = field(metadata=wire(if_absent=None))
    reason: str = field(metadata=wire(if_absent=""))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobExited(RunEvent):
    """A job ended before its last step.

    Attributes:
        job: Job id.
        reason: ``diverging``, ``overfitting``, ``collapsed``, ``underperforming``, ``stopped``, ``failed`` or
            ``budget``; or the reason of a rule that a package registers.
        evidence: The numbers on which the decision was based, by name.
        slot: Slot that it left; None if it had none.
        step: Steps done; None if the journal does not have it.
        best_step: Step of its best evaluation; 0 if there is none with a finite loss.
        best_validation_loss: Validation loss at ``best_step``, nats per token; None if there is none.
        samples_trained: Training rows seen, counting repeats over epochs; None if the journal does not have it.
        command: Id of the user's command; None if a rule ended the job.
    """

    job: str
    reason: ExitReason | str
    evidence: Mapping[str, float | str] = field(metadata=wire(if_absent={}, key_aliases=_EVIDENCE))
    slot: int | None = field(metadata=wire(if_absent=None))
    step: int | None = field(metadata=wire(if_absent=None))
    best_step: int = field(metadata=wire(if_absent=0))
    best_validation_loss: float | None = field(metadata=wire(if_absent=None))
    samples_trained: int | None = field(metadata=wire(if_absent=None))
    command: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCompleted(RunEvent):
    """A job did all its steps.

    Attributes:
        job: Job id.
        slot: Slot that it left; None if it had none.
        step: Steps done; None if the journal does not have it.
        best_step: Step of its best evaluation; 0 if there is none with a finite loss. Without validation, the last
            step.
        best_validation_loss: Validation loss at ``best_step``, nats per token; None if there is none.
        samples_trained: Training rows seen, counting repeats over epochs; None if the journal does not have it.
        test_loss: Without validation, the loss on the test rows after the last step; None otherwise.
        test_metrics: Metrics of the method on the test rows after the last step, by name; empty if ``test_loss`` is
            None.
    """

    job: str
    slot: int | None = field(metadata=wire(if_absent=None))
    step: int | None = field(metadata=wire(if_absent=None))
    best_step: int = field(metadata=wire(if_absent=0))
    best_validation_loss: float | None = field(metadata=wire(if_absent=None))
    samples_trained: int | None = field(metadata=wire(if_absent=None))
    test_loss: float | None = None
    test_metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAdded(RunEvent):
    """A job was added while the task runs: a clone (``alto job clone``), a configuration suggested by the search, or a
    copy of a better job with which a population continues.

    Attributes:
        origin: For a clone or copy: the original job. None for a suggestion.
        warm: Whether it starts with the best weights of ``origin``.
        command: Id of the user's command that made the clone; None for other jobs, or if the journal does not have it.
        forked_at: Step of ``origin`` from which it continues, with its weights and optimizer state; 0 for all other
            jobs.
        replaces: The job that ended to make room for it; None if there is none.
        values: The suggested point in the search space: values by canonical name, as the space spells them.
        job: Id of the added job.
        config: Its resolved configuration, canonical keys.
        total_steps: Optimizer steps of the job if nothing ends it early.
        samples_budgeted: Rows that it sees if nothing ends it early, counting repeats over epochs.
        num_parameters: Trainable parameters of its adapter; None if the journal does not have it.
    """

    origin: str | None = None
    warm: bool = field(metadata=wire(if_absent=False))
    command: str | None = field(metadata=wire(if_absent=None))
    forked_at: int = 0
    replaces: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    job: str
    config: Mapping[str, Any] = field(metadata=wire(if_absent={}))
    total_steps: int = field(metadata=wire(if_absent=0))
    samples_budgeted: int = field(metadata=wire(if_absent=0))
    num_parameters: int | None = None

    @property
    def description(self) -> JobDescription:
        """The job in the form in which ``task_started`` describes the first jobs."""
        return JobDescription(
            job=self.job,
            config=self.config,
            total_steps=self.total_steps,
            samples_budgeted=self.samples_budgeted,
            num_parameters=self.num_parameters,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReopened(RunEvent):
    """A job that had ended continues (``alto job resume``).

    Attributes:
        job: Job id.
        step: Steps done; None if the journal does not have it.
        command: Id of the user's command; None if the journal does not have it.
    """

    job: str
    step: int | None = field(metadata=wire(if_absent=None))
    command: str | None = field(metadata=wire(if_absent=None))
