"""The events of a run: one class each, in the order in which a run writes them first.

Steps are optimizer steps of one job, counted from 1. Losses are means in nats per trained token; of pairs, what their
loss gives. Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from alto.records import ExitReason, FinalistScore, MemoryProfile, Throughput
from alto.runs.events.facts import (
    BaseDescription,
    JobDescription,
    ReferenceFact,
    SavedJob,
    StartMeasurement,
    TiedJob,
)
from alto.runs.events.fields import wire

__all__ = [
    "FORMAT",
    "AdapterChecked",
    "BaseEvaluated",
    "CheckpointSaved",
    "CommandRefused",
    "FinalistsJudged",
    "GpusOffered",
    "JobAdded",
    "JobAdmitted",
    "JobCompleted",
    "JobEvaluated",
    "JobExited",
    "JobParked",
    "JobReopened",
    "JobResumed",
    "OutOfMemory",
    "ProfileMeasured",
    "RunEvent",
    "TaskCompleted",
    "TaskInterrupted",
    "TaskResumed",
    "TaskStarted",
    "TrainSteps",
    "WarmupEnded",
]

FORMAT = 2
"""Version of the journal's format that is written; a journal that does not say has 1, that of ALTO 0.1."""

_EVIDENCE = {"gain": "score", "cutoff_gain": "cutoff_score", "largest_pass": "largest_micro_batch"}
"""Numbers of an exit that version 0.1 calls otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStarted:
    """The first event: the task as resolved, and all its jobs.

    Attributes:
        task: Name of the task.
        model: Base model as the task names it.
        base_model: Folder or hub id that it was loaded from.
        dataset: Training rows as the task names them.
        method: ``sft``, ``dpo``, or another registered objective.
        metric: What the task chooses by: ``loss``, or something its method measures of which more is better.
        num_train: Training rows.
        num_validation: Validation rows.
        data: Rows and tokens of both splits, what was cut or left out, and a ``fingerprint`` of every token.
        max_slots: Slots of all ranks.
        early_exit: Early-exit settings, as the task file has them.
        device: Device of the first rank, for example ``cuda:0``.
        num_ranks: Processes that train the task.
        versions: Versions of Python and of packages, by name; None of one that is not installed.
        jobs: All jobs, in the order of the task.
        eval_steps: Share of a job's own steps between two evaluations; None where the journal does not say.
        notes: What a user should know of the data, the model and the settings, in sentences.
        packing: What decides which jobs share a forward pass, by key of the task file, and the ``device``; None where
            the journal does not say.
        base: What identifies the base model; None where the journal does not say.
        references: Of a method that needs reference log-probs, how they were found; None elsewhere.
        format: Version of the journal's format.
    """

    task: str = field(metadata=wire(if_absent="task"))
    model: str = field(metadata=wire(if_absent=""))
    base_model: str = field(metadata=wire(if_absent=""))
    dataset: str = field(metadata=wire(if_absent=""))
    method: str = field(metadata=wire(if_absent="sft"))
    metric: str = field(metadata=wire(if_absent="loss"))
    num_train: int = field(metadata=wire(if_absent=0))
    num_validation: int = field(metadata=wire(if_absent=0))
    data: Mapping[str, Any] = field(metadata=wire(if_absent={}))
    max_slots: int = field(metadata=wire(if_absent=0))
    early_exit: Mapping[str, Any] = field(metadata=wire(if_absent={}))
    device: str = field(metadata=wire(if_absent=""))
    num_ranks: int = field(metadata=wire(if_absent=1))
    versions: Mapping[str, str | None] = field(metadata=wire(if_absent={}))
    jobs: tuple[JobDescription, ...]
    eval_steps: float | None = None
    notes: tuple[str, ...] = field(default=(), metadata=wire(always=True))
    packing: Mapping[str, Any] | None = None
    base: BaseDescription | None = field(default=None, metadata=wire(damaged_is_none=True))
    references: ReferenceFact | None = None
    format: int = field(default=FORMAT, metadata=wire(if_absent=1, always=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResumed:
    """A process resumes the run; what came after the last checkpoint is cut.

    Attributes:
        notes: What was lost, and what a user should know, in sentences.
        versions: As of ``task_started``.
        max_slots: Slots of all ranks from now on; None where the journal does not say: as before.
        num_ranks: Processes that train the task from now on; None where the journal does not say: as before.
        base: As of ``task_started``, only where the run began with a version that did not write it.
    """

    notes: tuple[str, ...] = field(metadata=wire(if_absent=[]))
    versions: Mapping[str, str | None] = field(metadata=wire(if_absent={}))
    max_slots: int | None = field(metadata=wire(if_absent=None))
    num_ranks: int | None = field(metadata=wire(if_absent=None))
    base: BaseDescription | None = field(default=None, metadata=wire(damaged_is_none=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileMeasured:
    """What was measured of the task, now or in an earlier run, how it is packed and how long it may take.

    Attributes:
        is_cached: The profile is from an earlier run.
        profile_s: What measuring took, in seconds, whenever that was.
        memory: Memory model, in bytes.
        throughput: Throughput model, in seconds.
        slot_bytes: Memory of one slot.
        max_slots: Slots of the bank.
        max_tokens_per_step: Tokens of a step of all residents, at most.
        max_tokens_per_pass: Tokens of a micro-batch, at most.
        gradient_checkpointing: Whether activations are computed again in the backward pass.
        peak_bytes: Memory that comes to.
        duration_s: Seconds of training and evaluation if no job ends early.
        expected_duration_s: Seconds with the rungs of early exit.
    """

    is_cached: bool
    profile_s: float
    memory: MemoryProfile
    throughput: Throughput
    slot_bytes: int
    max_slots: int
    max_tokens_per_step: int
    max_tokens_per_pass: int
    gradient_checkpointing: bool
    peak_bytes: int
    duration_s: float
    expected_duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseEvaluated:
    """What validation gives with the frozen base, before the first step.

    Attributes:
        values: One entry for all jobs that have the same loss.
    """

    values: tuple[StartMeasurement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAdmitted:
    """A job enters a slot for the first time.

    Attributes:
        job: Job id.
        slot: Slots are counted through the ranks; the first of a job that trains on several.
        step: Steps done.
        reason: Why this job was chosen; empty where the journal does not say.
        ranks: Ranks that train it; empty where there is one only.
    """

    job: str
    slot: int
    step: int = field(metadata=wire(if_absent=0))
    reason: str = field(metadata=wire(if_absent=""))
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResumed:
    """A job that was parked is in a slot again.

    Attributes:
        job: Job id.
        slot: As of ``job_admitted``.
        step: Steps done.
        reason: Why this job was chosen; empty where the journal does not say.
        ranks: Ranks that train it; empty where there is one only.
    """

    job: str
    slot: int
    step: int = field(metadata=wire(if_absent=0))
    reason: str = field(metadata=wire(if_absent=""))
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSteps:
    """Training losses of consecutive steps of a job.

    Attributes:
        job: Job id.
        first_step: Step of the first loss.
        losses: One loss a step, nats per token.
    """

    job: str
    first_step: int
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvaluated:
    """An evaluation of a job.

    Attributes:
        job: Job id.
        step: Steps done.
        total_steps: Steps of the job if nothing ends it early; None where the journal does not say.
        train_ema: Exponentially smoothed training loss, nats per token.
        validation_loss: Loss on the validation rows, not smoothed, nats per token.
        is_best: Whether it is the best of the job so far; None where the journal does not say.
        metrics: What the method measured beside the loss, by name.
        metric_rows: The task's metric on every validation row, in their order; empty where that is the loss.
    """

    job: str
    step: int
    total_steps: int | None = field(metadata=wire(if_absent=None))
    train_ema: float = field(metadata=wire(if_absent=None))
    validation_loss: float = field(metadata=wire(if_absent=None))
    is_best: bool | None = field(metadata=wire(if_absent=None))
    metrics: Mapping[str, float] = field(default_factory=dict)
    metric_rows: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobParked:
    """A job leaves its slot with its state kept, and will come back.

    Attributes:
        job: Job id.
        slot: Slot that it left; None where the journal does not say.
        step: Steps done; None where the journal does not say.
        reason: Why; empty where the journal does not say.
    """

    job: str
    slot: int | None = field(metadata=wire(if_absent=None))
    step: int | None = field(metadata=wire(if_absent=None))
    reason: str = field(metadata=wire(if_absent=""))


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupEnded:
    """A rung was held.

    Attributes:
        rung: Its position in the early-exit settings, from 0.
        progress: Share of a job's own steps at which it ranks, in (0, 1].
        kept: Jobs that continue or keep their place, best first.
        dropped: Jobs that end here.
    """

    rung: int = field(metadata=wire(if_absent=0))
    progress: float = field(metadata=wire(if_absent=None))
    kept: tuple[str, ...] = field(metadata=wire(if_absent=[]))
    dropped: tuple[str, ...] = field(metadata=wire(if_absent=[]))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobExited:
    """A job ended before its last step.

    Attributes:
        job: Job id.
        reason: Why: ``diverging``, ``overfitting``, ``underperforming``, ``stopped`` or ``failed``; or the reason of a
            rule that a package registers.
        evidence: Numbers that the decision was based on, by name.
        slot: Slot that it left; None where it was in none.
        step: Steps done; None where the journal does not say.
        best_step: Step of its best evaluation; 0 where there is none with a finite loss.
        best_validation_loss: The loss there, nats per token; None where there is none.
        samples_trained: Training rows seen, counting repeats over epochs; None where the journal does not say.
        command: Id of the user's command that asked for it; None where a rule ended the job.
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
        step: Steps done; None where the journal does not say.
        best_step: Step of its best evaluation; 0 where there is none with a finite loss.
        best_validation_loss: The loss there, nats per token; None where there is none.
        samples_trained: Training rows seen, counting repeats over epochs; None where the journal does not say.
    """

    job: str
    slot: int | None = field(metadata=wire(if_absent=None))
    step: int | None = field(metadata=wire(if_absent=None))
    best_step: int = field(metadata=wire(if_absent=0))
    best_validation_loss: float | None = field(metadata=wire(if_absent=None))
    samples_trained: int | None = field(metadata=wire(if_absent=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAdded:
    """A job was added while the task runs: a clone (``alto job clone``).

    Attributes:
        origin: The job that it is a clone of.
        warm: Whether it starts with the weights of that job.
        command: Id of the user's command; None where the journal does not say.
        job: Its own id.
        config: Its resolved configuration, canonical keys.
        total_steps: Optimizer steps of the job if nothing ends it early.
        samples_budgeted: Rows that it sees if nothing ends it early, counting repeats over epochs.
        num_parameters: Trainable parameters of its adapter; None where the journal does not say.
    """

    origin: str
    warm: bool = field(metadata=wire(if_absent=False))
    command: str | None = field(metadata=wire(if_absent=None))
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
    """A job that was ended goes on (``alto job resume``).

    Attributes:
        job: Job id.
        step: Steps done; None where the journal does not say.
        command: Id of the user's command; None where the journal does not say.
    """

    job: str
    step: int | None = field(metadata=wire(if_absent=None))
    command: str | None = field(metadata=wire(if_absent=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRefused:
    """A user's command could not be carried out.

    Attributes:
        command: Id of the command.
        job: The job that it names.
        why: In a sentence.
    """

    command: str
    job: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """Memory ran out; the limit is lowered and the step is tried again, nothing is lost.

    Attributes:
        phase: ``forward``, ``backward``, ``update``, ``evaluation`` or ``bank``.
        residents: Jobs that had a part in what did not fit.
        num_tokens: Tokens of the micro-batch that did not fit; 0 where it was none.
        max_tokens_per_pass: Tokens of a micro-batch from now on, at most.
        num_slots: Slots of the bank from now on; None where it keeps those it has.
    """

    phase: str = field(metadata=wire(if_absent=""))
    residents: tuple[str, ...] = field(metadata=wire(if_absent=[]))
    num_tokens: int = field(metadata=wire(if_absent=0))
    max_tokens_per_pass: int = field(metadata=wire(if_absent=0))
    num_slots: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusOffered:
    """Fewer jobs are left than ranks: what they would still take.

    Attributes:
        num_gpus: As many as there are jobs.
        duration_s: Seconds on so many, a job each.
        data_parallel_duration_s: Seconds on all GPUs of the task, every job on all of them.
    """

    num_gpus: int
    duration_s: float
    data_parallel_duration_s: float = field(metadata=wire(aliases=("spread_duration_s",)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """Everything up to here survives a kill.

    Attributes:
        jobs: What is saved, by job id; jobs that have not begun are not in it.
    """

    jobs: Mapping[str, SavedJob]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInterrupted:
    """The run was stopped by Ctrl-C or SIGTERM, with everything saved.

    Attributes:
        training: Jobs that still have to train.
    """

    training: tuple[str, ...] = field(metadata=wire(if_absent=[]))


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalistsJudged:
    """``select_by: eval_accuracy``: the finalists answered the validation questions.

    Attributes:
        scores: How many each answered right; best by the metric first.
    """

    scores: tuple[FinalistScore, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterChecked:
    """Whether PEFT, where it is installed, loads the best adapter as it was trained.

    Attributes:
        job: Job of the adapter.
        status: ``equal``, ``different`` (PEFT gives other logits, or cannot load it) or ``unchecked``.
        why: Of ``different`` and ``unchecked``, the reason; empty elsewhere.
        difference: Between PEFT's and ALTO's logits of a few tokens, relative, in norm; None where PEFT gave none.
        peft: Version of PEFT; None where it is not installed.
    """

    job: str = field(metadata=wire(if_absent=""))
    status: Literal["equal", "different", "unchecked"]
    why: str = field(metadata=wire(if_absent=""))
    difference: float | None = field(metadata=wire(if_absent=None))
    peft: str | None = field(metadata=wire(if_absent=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCompleted:
    """The last event: the winner, and what the task took.

    Attributes:
        best_job: The job whose adapter was chosen.
        best_validation_loss: Its loss, nats per token.
        samples_trained: Training rows that all jobs saw.
        samples_budgeted: Rows that they would have seen without early exit.
        within_noise: Jobs whose metric cannot be told from the winner's on so many validation rows.
    """

    best_job: str
    best_validation_loss: float = field(metadata=wire(if_absent=None))
    samples_trained: int = field(metadata=wire(if_absent=0))
    samples_budgeted: int = field(metadata=wire(if_absent=0))
    within_noise: tuple[TiedJob, ...] = ()


RunEvent: TypeAlias = (
    TaskStarted
    | TaskResumed
    | ProfileMeasured
    | BaseEvaluated
    | JobAdmitted
    | JobResumed
    | TrainSteps
    | JobEvaluated
    | JobParked
    | WarmupEnded
    | JobExited
    | JobCompleted
    | JobAdded
    | JobReopened
    | CommandRefused
    | OutOfMemory
    | GpusOffered
    | CheckpointSaved
    | TaskInterrupted
    | FinalistsJudged
    | AdapterChecked
    | TaskCompleted
)
