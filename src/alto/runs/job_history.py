"""The parts of the state of a run and of its jobs that :mod:`alto.runs.history` fills in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from alto.records import ExitReason, LossPoint, ShownAnswer, StartValue


class RunStatus(StrEnum):
    """The status of a run, or of a queue of runs.

    ``interrupted``: it is not finished, and no process works on it.
    """

    RUNNING = "running"
    INTERRUPTED = "interrupted"
    FINISHED = "finished"

    @classmethod
    def of(cls, *, is_finished: bool, is_live: bool) -> RunStatus:
        """Return the status of a run, from whether it has its result and whether a process works on it."""
        if is_finished:
            return cls.FINISHED
        return cls.RUNNING if is_live else cls.INTERRUPTED


class Stage(StrEnum):
    """The stage of a job."""

    PENDING = "pending"
    TRAINING = "training"
    PARKED = "parked"
    EXITED = "exited"
    COMPLETED = "completed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RungOutcome:
    """The result of a rung.

    Attributes:
        rung: Position of the rung in the task's early-exit settings, from 0 as in the journal.
        kept: Ids of the jobs that continue or keep their place, best first.
        samples_trained: Rows that all jobs together had seen when the rung was decided.
    """

    rung: int
    progress: float
    kept: tuple[str, ...]
    dropped: tuple[str, ...]
    samples_trained: int


@dataclass(slots=True, kw_only=True)
class Occupancy:
    """One stay of a job in a slot; ``end`` is None while it lasts. A job on several ranks has one stay on each.

    Attributes:
        slot: Slot, numbered over all ranks.
        local_slot: Number of the slot within that bank.
        start, end: Begin and end of the stay, in unix seconds.
    """

    job: str
    slot: int
    rank: int
    local_slot: int
    start: float
    end: float | None = None


@dataclass(slots=True, kw_only=True)
class JobHistory:
    """The state of one job after the events seen so far.

    Attributes:
        position: Position in the task's list of jobs; breaks ties of equal scores.
        total_steps: Optimizer steps of the job if nothing ends it early.
        samples_budgeted: Rows that the job sees if nothing ends it early.
        slot: Slot that it occupies, None if none; the first rank's slot if it trains on several ranks.
        ranks: Ranks that train it; empty while it has no slot.
        train_losses: Training loss of every step; NaN where the journal has a gap.
        evaluations: One point per evaluation, in the order of steps.
        metrics: Metrics of its method at each evaluation, by name.
        best_step: Step of its best evaluation by the task's metric; 0 if there is none with a finite loss yet.
        best_validation_loss: Validation loss at ``best_step``; infinity if there is none yet, or no validation.
        best_score: Value of the task's metric at ``best_step``, higher is better; 0 if the metric is the loss.
        best_loss_rows, best_metric_rows: Loss and task metric of every validation row at ``best_step``. Empty if
            unknown; ``best_metric_rows`` is also empty if the metric is the loss.
        test_losses: Loss on the test rows by step, for every evaluation that was its best so far; empty if there are no
            test rows.
        test_metrics: Metrics of its method on the test rows, by the same steps.
        answers: Answers to the first validation rows by step, if it learns from rewards; step 0 is before training.
        exit_evidence: Numbers on which the exit was based, by name.
        origin: For a clone or copy: the original job. None for all other jobs.
        forked_at: Step of ``origin`` from which a copy continues; 0 for all other jobs.
        starts_warm: Whether it is a clone that began with the best weights of ``origin``.
        is_suggested: Whether the search added it while other jobs trained.
        start: The evaluation before its first step; None if the journal does not have it.
        configuration: Id of the first job with the same configuration, if jobs repeat configurations with other seeds;
            None for a job that repeats none.
    """

    job: str
    position: int
    origin: str | None = None
    forked_at: int = 0
    starts_warm: bool = False
    is_suggested: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    total_steps: int = 0
    samples_budgeted: int = 0
    stage: Stage = Stage.PENDING
    slot: int | None = None
    ranks: tuple[int, ...] = ()
    step: int = 0
    train_losses: list[float] = field(default_factory=list)
    evaluations: list[LossPoint] = field(default_factory=list)
    metrics: list[Mapping[str, float]] = field(default_factory=list)
    best_step: int = 0
    best_validation_loss: float = math.inf
    best_score: float = 0.0
    best_metrics: Mapping[str, float] = field(default_factory=dict)
    best_loss_rows: tuple[float, ...] = ()
    best_metric_rows: tuple[float, ...] = ()
    test_losses: dict[int, float] = field(default_factory=dict)
    test_metrics: dict[int, Mapping[str, float]] = field(default_factory=dict)
    answers: dict[int, tuple[ShownAnswer, ...]] = field(default_factory=dict)
    exit_reason: ExitReason | str | None = None
    exit_evidence: Mapping[str, float | str] = field(default_factory=dict)
    start: StartValue | None = None
    configuration: str | None = None
    samples_at_end: int | None = None

    @property
    def has_ended(self) -> bool:
        return self.stage in (Stage.EXITED, Stage.COMPLETED)

    @property
    def outcome(self) -> str:
        """The exit reason if it has one, else the name of its stage."""
        return self.exit_reason or self.stage.value

    @property
    def progress(self) -> float:
        """Share of its own steps done, in [0, 1]."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else 0.0

    @property
    def samples_trained(self) -> int:
        """Rows seen so far: the reported count once the job has ended, before that in proportion to its steps."""
        if self.samples_at_end is not None:
            return self.samples_at_end
        own_steps = self.total_steps - self.forked_at
        return round((self.step - self.forked_at) / own_steps * self.samples_budgeted) if own_steps > 0 else 0

    @property
    def samples_saved(self) -> int:
        """Budgeted rows saved by its early exit; 0 while the job may still train them, or if a budget ended it."""
        return 0 if self.exit_reason == ExitReason.BUDGET else self._samples_left

    @property
    def samples_cut_off(self) -> int:
        """Rows that it did not train because ``search.budget`` ended it."""
        return self._samples_left if self.exit_reason == ExitReason.BUDGET else 0

    @property
    def _samples_left(self) -> int:
        return max(0, self.samples_budgeted - self.samples_trained) if self.stage is Stage.EXITED else 0

    @property
    def train_loss(self) -> float | None:
        """Smoothed training loss of the latest evaluation, else the latest training loss; None before the first
        step."""
        if self.evaluations:
            return self.evaluations[-1].train_ema
        return self.train_losses[-1] if self.train_losses else None

    @property
    def validation_loss(self) -> float | None:
        """Validation loss of the latest evaluation; None before the first."""
        return self.evaluations[-1].validation_loss if self.evaluations else None

    @property
    def best_test_loss(self) -> float | None:
        """Loss on the test rows at its best evaluation; None if it was not measured."""
        return self.test_losses.get(self.best_step)

    @property
    def best_test_metrics(self) -> Mapping[str, float]:
        """Metrics of its method on the test rows at its best evaluation; empty if they were not measured."""
        return self.test_metrics.get(self.best_step, {})

    @property
    def best_sort_key(self) -> tuple[float, float]:
        """Sort key of jobs, best first; same order as :attr:`LossPoint.sort_key` of evaluations."""
        return (-self.best_score, self.best_validation_loss)

    @property
    def rank_key(self) -> tuple[bool, tuple[float, float], int]:
        """Sort key of jobs, best first; a job without a finite validation loss comes last."""
        has_none = not math.isfinite(self.best_validation_loss)
        return (has_none, (0.0, 0.0) if has_none else self.best_sort_key, self.position)

    def keep_best(self, step: int, validation_loss: float) -> None:
        """Set the evaluation at ``step`` as its best."""
        self.best_step, self.best_validation_loss = step, validation_loss
        # Search backwards, because the best evaluation is usually a late one.
        for point, metrics in zip(reversed(self.evaluations), reversed(self.metrics), strict=True):
            if point.step == step:
                self.best_score, self.best_metrics = point.score, metrics
                break
