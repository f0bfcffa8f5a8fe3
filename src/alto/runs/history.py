"""What happened in a run, folded from its journal one event at a time.

The same fold serves the live view (events as they are written) and the report (events read back from disk), so that
both always tell the same story. Events and fields that this version does not know are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from alto.records import AdapterCheck, FinalistScore, LossPoint, Rung, StartValue
from alto.runs.fold import JournalFold
from alto.runs.journal import Event
from alto.runs.run_dir import RunDir
from alto.spec.early_exit import EarlyExit
from alto.spec.metric import LOSS, score_of

__all__ = ["JobHistory", "Occupancy", "RunHistory", "RungOutcome", "Stage", "read_history"]


class Stage(StrEnum):
    """Where a job is in its life."""

    PENDING = "pending"
    TRAINING = "training"
    PARKED = "parked"
    EXITED = "exited"
    COMPLETED = "completed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RungOutcome:
    """How a rung ended.

    Attributes:
        rung: Position of the rung in the task's early-exit settings, as the journal counts it.
        progress: Share of a job's own steps at which the rung ranks.
        kept: Job ids that go on or keep their place, best first.
        dropped: Job ids that ended here.
    """

    rung: int
    progress: float
    kept: tuple[str, ...]
    dropped: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class Occupancy:
    """One stay of a job in a slot, in unix seconds; ``end`` is None while it lasts. One that is spread over the ranks
    has a stay on each.

    Attributes:
        slot: Slots are counted through the ranks.
        rank: Whose bank has the slot.
        place: Where it lies there.
    """

    job: str
    slot: int
    rank: int
    place: int
    start: float
    end: float | None = None


@dataclass(slots=True, kw_only=True)
class JobHistory:
    """State of one job after the events seen so far.

    Attributes:
        position: Place in the task's list of jobs; breaks ties of equal scores.
        total_steps: Optimizer steps of the job if nothing ends it early.
        samples_budgeted: Rows the job sees if nothing ends it early.
        slot: Slot it sits in, None while it is in none; the first of one that is spread over the ranks.
        ranks: Ranks that train it, none while it is in no slot.
        step: Steps done.
        train_losses: Training loss of every step; NaN where the journal has a gap.
        evaluations: One point per evaluation, in the order of their steps.
        metrics: What its method measured at each of them beside the loss, by name.
        best_step: Step of its best evaluation by the task's metric, 0 if there is none with a finite loss yet.
        best_validation_loss: The loss there, infinity if there is none yet.
        best_score: Value of the task's metric there, more is better; 0 where that is the loss.
        best_metrics: What its method measured there.
        exit_reason: Why it ended early, as the journal spells it; None if it did not.
        origin: The job it is a clone of; None if it came with the task.
        start: What validation gave before its first step; None where the journal does not say.
    """

    job: str
    position: int
    origin: str | None = None
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
    exit_reason: str | None = None
    exit_evidence: Mapping[str, Any] = field(default_factory=dict)
    start: StartValue | None = None
    samples_at_end: int | None = None

    @property
    def has_ended(self) -> bool:
        return self.stage in (Stage.EXITED, Stage.COMPLETED)

    @property
    def outcome(self) -> str:
        """The reason of its exit if it has one, else the name of its stage."""
        return self.exit_reason or self.stage.value

    @property
    def progress(self) -> float:
        """Share of its own steps done, in [0, 1]."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else 0.0

    @property
    def samples_trained(self) -> int:
        """Rows seen so far: counted once the job has ended, in proportion to its steps before."""
        if self.samples_at_end is not None:
            return self.samples_at_end
        return round(self.progress * self.samples_budgeted)

    @property
    def samples_saved(self) -> int:
        """Budgeted rows that an exit spared; 0 while the job may still train them."""
        return max(0, self.samples_budgeted - self.samples_trained) if self.stage is Stage.EXITED else 0

    @property
    def train_loss(self) -> float | None:
        """Smoothed training loss of the latest evaluation, else the latest loss; None before the first step."""
        if self.evaluations:
            return self.evaluations[-1].train_ema
        return self.train_losses[-1] if self.train_losses else None

    @property
    def validation_loss(self) -> float | None:
        """Validation loss of the latest evaluation; None before the first."""
        return self.evaluations[-1].validation_loss if self.evaluations else None

    @property
    def best_sort_key(self) -> tuple[float, float]:
        """Orders jobs, the least first, as :attr:`LossPoint.sort_key` orders evaluations."""
        return (-self.best_score, self.best_validation_loss)

    @property
    def rank_key(self) -> tuple[bool, tuple[float, float], int]:
        """Sorts jobs best first; a job without a finite validation loss comes last."""
        has_none = not math.isfinite(self.best_validation_loss)
        return (has_none, (0.0, 0.0) if has_none else self.best_sort_key, self.position)


class RunHistory(JournalFold):
    """Folds journal events into the state of a run.

    Attributes:
        settings: The ``task_started`` event without its jobs (model, dataset, early exit, versions, …).
        jobs: Every job by id, in the order of the task.
        rungs: Outcomes of the rungs that have been decided.
        occupancy: Every stay of a job in a slot, in the order of admission.
        memory_events: Every time memory ran out, oldest first, as the journal tells it.
        finalists: How those answered among whom answers choose the winner, best by the metric first.
        adapter_check: Whether PEFT loads the best adapter as it was trained; None until that is known.
        result: The ``task_completed`` event, None while the run is unfinished.
    """

    def __init__(self) -> None:
        super().__init__()
        self.settings: dict[str, Any] = {}
        self.jobs: dict[str, JobHistory] = {}
        self.rungs: list[RungOutcome] = []
        self.occupancy: list[Occupancy] = []
        self.memory_events: list[Event] = []
        self.finalists: tuple[FinalistScore, ...] = ()
        self.adapter_check: AdapterCheck | None = None
        self.result: dict[str, Any] | None = None
        self._open_stays: dict[str, list[Occupancy]] = {}
        self._handlers = {
            "task_started": self._on_task_started,
            "task_resumed": self._on_task_resumed,
            "base_evaluated": self._on_base_evaluated,
            "job_added": self._on_job_added,
            "job_reopened": self._on_job_reopened,
            "job_admitted": self._on_enter_slot,
            "job_resumed": self._on_enter_slot,
            "train": self._on_train,
            "eval": self._on_eval,
            "job_parked": self._on_parked,
            "job_exited": self._on_exited,
            "job_completed": self._on_completed,
            "warmup_ended": self._on_warmup_ended,
            "oom": self.memory_events.append,
            "finalists_judged": self._on_finalists_judged,
            "adapter_checked": self._on_adapter_checked,
            "task_completed": self._on_task_completed,
        }

    @property
    def name(self) -> str:
        return str(self.settings.get("task", "task"))

    @property
    def metric(self) -> str:
        """What the task chooses by: ``loss``, or something its method measures of which more is better."""
        return str(self.settings.get("metric") or LOSS)

    @property
    def rung_settings(self) -> tuple[Rung, ...]:
        """The rungs the task was started with; none where early exit or its selection is switched off."""
        written = self.settings.get("early_exit") or {}
        if not written.get("rungs"):
            return ()
        early_exit = EarlyExit.of_run({**written, "rules": {}})  # a package that brings one may not be here
        return early_exit.selection_rungs if early_exit.enabled and early_exit.select else ()

    @property
    def num_ranks(self) -> int:
        """Ranks that the task is trained on, since it was resumed last."""
        return int(self.settings.get("num_ranks") or 1)

    @property
    def num_slots(self) -> int:
        """Slots of all ranks, at least as many as were seen in use."""
        used = max((stay.slot for stay in self.occupancy), default=-1) + 1
        return max(int(self.settings.get("max_slots") or 0), used)

    @property
    def best(self) -> JobHistory | None:
        """The job the task chose, or the best so far; None while no job has a finite validation loss."""
        if self.result is not None and (chosen := self.jobs.get(str(self.result.get("best_job")))) is not None:
            return chosen
        leader = min(self.jobs.values(), key=lambda job: job.rank_key, default=None)
        return leader if leader is not None and math.isfinite(leader.best_validation_loss) else None

    @property
    def samples_budgeted(self) -> int:
        return sum(job.samples_budgeted for job in self.jobs.values())

    @property
    def samples_trained(self) -> int:
        return sum(job.samples_trained for job in self.jobs.values())

    @property
    def samples_saved(self) -> int:
        return sum(job.samples_saved for job in self.jobs.values())

    @property
    def saved_share(self) -> float:
        """Share of the budgeted rows that exits have spared so far, in [0, 1]."""
        return self.samples_saved / self.samples_budgeted if self.samples_budgeted else 0.0

    @property
    def settled_share(self) -> float:
        """Share of the budgeted rows that are trained or spared, in [0, 1]; 1 when nothing is left to do."""
        if not self.samples_budgeted:
            return 0.0
        return min(1.0, (self.samples_trained + self.samples_saved) / self.samples_budgeted)

    def ranked(self) -> list[JobHistory]:
        """All jobs, the chosen one first, then by their best evaluation."""
        best = self.best
        return sorted(self.jobs.values(), key=lambda job: (job is not best, job.rank_key))

    def _job(self, event: Event) -> JobHistory:
        job = str(event["job"])
        if job not in self.jobs:
            self.jobs[job] = JobHistory(job=job, position=len(self.jobs))
        return self.jobs[job]

    def _on_task_started(self, event: Event) -> None:
        self.settings = {key: value for key, value in event.items() if key not in ("seq", "time", "event", "jobs")}
        for entry in event.get("jobs") or ():
            self._plan(entry)

    def _on_base_evaluated(self, event: Event) -> None:
        for value in event["values"]:
            metrics = {name: _number(number) for name, number in (value.get("metrics") or {}).items()}
            start = StartValue(
                validation_loss=_number(value.get("validation_loss")), score=score_of(self.metric, metrics)
            )
            for job in value["jobs"]:
                self._job({"job": job}).start = start

    def _on_job_added(self, event: Event) -> None:
        self._plan(event).origin = str(event["origin"])

    def _plan(self, entry: Event) -> JobHistory:
        job = self._job(entry)
        job.config = dict(entry.get("config") or {})
        job.total_steps = int(entry.get("total_steps") or 0)
        job.samples_budgeted = int(entry.get("samples_budgeted") or 0)
        return job

    def _on_task_resumed(self, event: Event) -> None:
        # Stays that the interruption cut off end with the last event before it: nothing was trained after that.
        for name in list(self._open_stays):
            job = self.jobs[name]
            self._leave_slot(job, self.last_seen_at, stage=Stage.PARKED if job.step else Stage.PENDING)
        self.settings["notes"] = [*(event.get("notes") or ()), *(self.settings.get("notes") or ())]
        self.settings |= {key: event[key] for key in ("num_ranks", "max_slots") if key in event}
        self._note_interruption(event)

    def _on_job_reopened(self, event: Event) -> None:
        job = self._job(event)
        job.exit_reason, job.exit_evidence, job.samples_at_end = None, {}, None
        job.stage = Stage.PARKED if job.step else Stage.PENDING

    def _on_enter_slot(self, event: Event) -> None:
        job = self._job(event)
        self._leave_slot(job, event.get("time"), stage=Stage.TRAINING)
        job.slot = int(event["slot"])
        job.ranks = tuple(map(int, event.get("ranks") or (0,)))
        job.step = int(event.get("step") or 0)
        per_rank = max(1, int(self.settings.get("max_slots") or 0) // self.num_ranks)
        place = job.slot % per_rank if self.num_ranks > 1 else job.slot
        start = float(event.get("time") or 0.0)
        stays = [
            Occupancy(
                job=job.job, slot=job.slot + (rank - job.ranks[0]) * per_rank, rank=rank, place=place, start=start
            )
            for rank in job.ranks
        ]
        self._open_stays[job.job] = stays
        self.occupancy += stays

    def _on_train(self, event: Event) -> None:
        job = self._job(event)
        losses = [_number(loss) for loss in event["losses"]]
        first = int(event["first_step"]) - 1
        job.train_losses += [math.nan] * (first - len(job.train_losses))
        job.train_losses += losses
        job.step = len(job.train_losses)

    def _on_eval(self, event: Event) -> None:
        job = self._job(event)
        metrics = {name: _number(value) for name, value in (event.get("metrics") or {}).items()}
        point = LossPoint(
            job=job.job,
            step=int(event["step"]),
            total_steps=int(event.get("total_steps") or job.total_steps or event["step"]),
            train_ema=_number(event.get("train_ema")),
            validation_loss=_number(event.get("validation_loss")),
            score=score_of(self.metric, metrics),
        )
        job.evaluations.append(point)
        job.metrics.append(metrics)
        job.step = max(job.step, point.step)
        leads = math.isfinite(point.validation_loss) and (not job.best_step or point.sort_key < job.best_sort_key)
        if event.get("is_best", leads):
            _keep_best(job, point.step, point.validation_loss)

    def _on_parked(self, event: Event) -> None:
        job = self._job(event)
        self._leave_slot(job, event.get("time"), stage=Stage.PARKED)
        job.step = int(event.get("step") or job.step)

    def _on_exited(self, event: Event) -> None:
        job = self._job(event)
        self._end(job, event, stage=Stage.EXITED)
        job.exit_reason = str(event.get("reason") or "exited")
        job.exit_evidence = dict(event.get("evidence") or {})

    def _on_completed(self, event: Event) -> None:
        self._end(self._job(event), event, stage=Stage.COMPLETED)

    def _on_warmup_ended(self, event: Event) -> None:
        self.rungs.append(
            RungOutcome(
                rung=int(event.get("rung") or 0),
                progress=_number(event.get("progress")),
                kept=tuple(map(str, event.get("kept") or ())),
                dropped=tuple(map(str, event.get("dropped") or ())),
            )
        )

    def _on_finalists_judged(self, event: Event) -> None:
        self.finalists = tuple(FinalistScore(**score) for score in event["scores"])

    def _on_adapter_checked(self, event: Event) -> None:
        difference = event.get("difference")
        self.adapter_check = AdapterCheck(
            status=event["status"],
            why=str(event.get("why") or ""),
            difference=None if difference is None else _number(difference),
            peft=event.get("peft"),
        )

    def _on_task_completed(self, event: Event) -> None:
        self.result = dict(event)

    def _end(self, job: JobHistory, event: Mapping[str, Any], *, stage: Stage) -> None:
        self._leave_slot(job, event.get("time"), stage=stage)
        job.step = int(event.get("step") or job.step)
        if (samples := event.get("samples_trained")) is not None:
            job.samples_at_end = int(samples)
        best = _number(event.get("best_validation_loss"))
        if math.isfinite(best):
            _keep_best(job, int(event.get("best_step") or 0), best)

    def _leave_slot(self, job: JobHistory, time: float | None, *, stage: Stage) -> None:
        for stay in self._open_stays.pop(job.job, ()):
            stay.end = stay.start if time is None else time
        job.slot, job.ranks, job.stage = None, (), stage


def read_history(run_dir: str | Path) -> RunHistory:
    """The history of the run in ``run_dir``.

    Raises:
        RunNotFoundError: It holds no journal.
        RunError: The journal is damaged, or says what no ALTO writes.
    """
    return RunHistory.read(RunDir(Path(run_dir)).journal_file)


def _keep_best(job: JobHistory, step: int, validation_loss: float) -> None:
    job.best_step, job.best_validation_loss = step, validation_loss
    for point, metrics in zip(job.evaluations, job.metrics, strict=True):
        if point.step == step:
            job.best_score, job.best_metrics = point.score, metrics


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
