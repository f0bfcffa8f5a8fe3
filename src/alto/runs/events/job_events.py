"""The events of one job of a run.

Steps are optimizer steps of one job, counted from 1. Losses are means in nats per trained token; for pairs, in the unit
of their loss. Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from alto.records import ExitReason
from alto.runs.events.facts import JobDescription
from alto.runs.events.fields import wire

__all__ = [
    "BestMeasured",
    "JobAdded",
    "JobAdmitted",
    "JobCompleted",
    "JobEvaluated",
    "JobExited",
    "JobParked",
    "JobReopened",
    "JobResumed",
    "TrainSteps",
]

_EVIDENCE = {"gain": "score", "cutoff_gain": "cutoff_score", "largest_pass": "largest_micro_batch"}
"""Version 0.1's names of an exit's numbers."""

_REASONS = {"spreads": "data_parallel"}
"""Version 0.1's names of reasons of an admission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAdmitted:
    """A job enters a slot for the first time.

    Attributes:
        job: Job id.
        slot: Slots are counted through the ranks; the first of a job that trains on several.
        step: Steps done.
        reason: Why this job was chosen; empty where the journal does not have it.
        ranks: Ranks that train it; empty where there is one only.
    """

    job: str
    slot: int
    step: int = field(metadata=wire(if_absent=0))
    reason: str = field(metadata=wire(if_absent="", value_aliases=_REASONS))
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResumed:
    """A job that was parked is in a slot again.

    Attributes:
        job: Job id.
        slot: As of ``job_admitted``.
        step: Steps done.
        reason: Why this job was chosen; empty where the journal does not have it.
        ranks: Ranks that train it; empty where there is one only.
    """

    job: str
    slot: int
    step: int = field(metadata=wire(if_absent=0))
    reason: str = field(metadata=wire(if_absent="", value_aliases=_REASONS))
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSteps:
    """Training losses of consecutive steps of a job.

    Attributes:
        job: Job id.
        first_step: Step of the first loss.
        losses: One loss a step, nats per token.
        router_losses: The load-balancing loss of the routers at each of these steps, which is not in ``losses`` and not
            multiplied by ``router_aux_loss_coef``; empty where the job trains without it.
    """

    job: str
    first_step: int
    losses: tuple[float, ...]
    router_losses: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvaluated:
    """An evaluation of a job.

    Attributes:
        job: Job id.
        step: Steps done.
        total_steps: Steps of the job if nothing ends it early; None where the journal does not have it.
        train_ema: Exponentially smoothed training loss, nats per token.
        validation_loss: Loss on the validation rows, not smoothed, nats per token.
        is_best: Whether it is the best of the job so far; None where the journal does not have it.
        metrics: Metrics of the method beside the loss, by name.
        metric_rows: The task's metric on every validation row, in their order; empty where that is the loss.
        loss_rows: Where the task has an order of evaluation: loss of every row of this evaluation, the first in that
            order, six significant digits. Elsewhere loss of every validation row, four significant digits; at rungs,
            after the last step, and where it is the best of the job so far.
        test_loss: Loss on the test rows; None where it was not measured (the task's ``test_jobs``).
        test_rows: Loss of every test row, four significant digits; empty where ``test_loss`` is None.
        test_metrics: Metrics of the method on the test rows, by name; empty where ``test_loss`` is None.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BestMeasured:
    """The best adapter of a job was measured in the end, on more validation rows than at its evaluation.

    Attributes:
        job: Job id.
        step: Step of its best evaluation.
        validation_loss: Loss on these rows, nats per token.
        metrics: Metrics of the method beside the loss, by name.
        loss_rows: Loss of every row, the first in the order of evaluation, six significant digits.
        test_loss: Loss on the test rows; None where it was not measured.
        test_rows: Loss of every test row, four significant digits; empty where ``test_loss`` is None.
        test_metrics: Metrics of the method on the test rows, by name; empty where ``test_loss`` is None.
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
class JobParked:
    """A job leaves its slot; its state is kept and it will be resumed.

    Attributes:
        job: Job id.
        slot: Slot that it left; None where the journal does not have it.
        step: Steps done; None where the journal does not have it.
        reason: Why; empty where the journal does not have it.
    """

    job: str
    slot: int | None = field(metadata=wire(if_absent=None))
    step: int | None = field(metadata=wire(if_absent=None))
    reason: str = field(metadata=wire(if_absent=""))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobExited:
    """A job ended before its last step.

    Attributes:
        job: Job id.
        reason: Why: ``diverging``, ``overfitting``, ``underperforming``, ``stopped``, ``failed`` or ``budget``; or the
            reason of a rule that a package registers.
        evidence: The numbers that the decision was based on, by name.
        slot: Slot that it left; None where it was in none.
        step: Steps done; None where the journal does not have it.
        best_step: Step of its best evaluation; 0 where there is none with a finite loss.
        best_validation_loss: The loss there, nats per token; None where there is none.
        samples_trained: Training rows seen, counting repeats over epochs; None where the journal does not have it.
        command: Id of the user's command; None where a rule ended the job.
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
class JobCompleted:
    """A job did all its steps.

    Attributes:
        job: Job id.
        slot: Slot that it left; None where it was in none.
        step: Steps done; None where the journal does not have it.
        best_step: Step of its best evaluation; 0 where there is none with a finite loss. Without validation, the last.
        best_validation_loss: The loss there, nats per token; None where there is none.
        samples_trained: Training rows seen, counting repeats over epochs; None where the journal does not have it.
        test_loss: Loss on the test rows after the last step, where there is no validation; None elsewhere.
        test_metrics: Metrics of the method on the test rows then, by name; empty where ``test_loss`` is None.
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
class JobAdded:
    """A job was added while the task runs: a clone (``alto job clone``), a configuration that the search suggests, or a
    copy of a better job that a population continues with.

    Attributes:
        origin: The job that it is a clone or a copy of; None of a suggestion.
        warm: Whether it starts with the best weights of that job.
        command: Id of the user's command; None of all other jobs, and where the journal does not have it.
        forked_at: Steps after which it continues where ``origin`` is, with its weights and optimizer state; 0 of all
            other jobs.
        replaces: The job that ended for it; None where there is none.
        values: The place in the search space that was suggested: canonical names to values as the space spells them.
        job: Its own id.
        config: Its resolved configuration, canonical keys.
        total_steps: Optimizer steps of the job if nothing ends it early.
        samples_budgeted: Rows that it sees if nothing ends it early, counting repeats over epochs.
        num_parameters: Trainable parameters of its adapter; None where the journal does not have it.
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
        """The job as ``task_started`` describes those that came with the task."""
        return JobDescription(
            job=self.job,
            config=self.config,
            total_steps=self.total_steps,
            samples_budgeted=self.samples_budgeted,
            num_parameters=self.num_parameters,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReopened:
    """A job that was ended continues (``alto job resume``).

    Attributes:
        job: Job id.
        step: Steps done; None where the journal does not have it.
        command: Id of the user's command; None where the journal does not have it.
    """

    job: str
    step: int | None = field(metadata=wire(if_absent=None))
    command: str | None = field(metadata=wire(if_absent=None))
