"""The events of a run as a whole, and the union of all events of a run.

Steps are optimizer steps of one job, counted from 1. Losses are means in nats per trained token; for pairs, in the unit
of their loss. Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from alto.records import FinalistScore, MemoryProfile, Sample, Throughput
from alto.runs.events.facts import (
    BaseDescription,
    JobDescription,
    ReferenceFact,
    RefitFact,
    SavedJob,
    StartFact,
    StartMeasurement,
    TiedJob,
)
from alto.runs.events.fields import wire
from alto.runs.events.job_events import (
    BestMeasured,
    JobAdded,
    JobAdmitted,
    JobCompleted,
    JobEvaluated,
    JobExited,
    JobParked,
    JobReopened,
    JobResumed,
    TrainSteps,
)

__all__ = [
    "FORMAT",
    "AdapterChecked",
    "BaseEvaluated",
    "CheckpointSaved",
    "CommandRefused",
    "FinalistsJudged",
    "GpusOffered",
    "KernelsCompiled",
    "OutOfMemory",
    "ProfileMeasured",
    "RunEvent",
    "RungScored",
    "SamplesGenerated",
    "ShareReceived",
    "TaskCompleted",
    "TaskInterrupted",
    "TaskResumed",
    "TaskStarted",
    "WarmupEnded",
]

FORMAT = 2
"""Version of the journal's format that is written; a journal without it has 1, that of ALTO 0.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStarted:
    """The first event: the task as resolved, and all its jobs.

    Attributes:
        task: Name of the task.
        model: Base model as the task names it.
        base_model: Folder or hub id that it was loaded from.
        dataset: Training rows as the task names them.
        method: ``sft``, ``dpo``, or another registered objective.
        metric: The metric that the task selects by: ``loss``, or a metric of its method that is better when higher.
        num_train: Training rows.
        num_validation: Validation rows.
        data: Rows and tokens of every split, what was cut or left out, the ``form`` of the rows, whether their replies
            are lists of messages (``of_messages``), the ``max_length`` at which they are cut, a ``fingerprint`` of
            every token, and one of training and validation rows (``train_validation_fingerprint``) and of validation
            rows (``validation_fingerprint``).
        max_slots: Slots of all ranks.
        early_exit: Early-exit settings, as the task file has them.
        device: Device of the first rank, for example ``cuda:0``.
        num_ranks: Processes that train the task.
        versions: Versions of Python and of packages, by name; None of one that is not installed.
        jobs: All jobs, in the order of the task.
        eval_steps: Share of a job's own steps between two evaluations; None where the journal does not have it.
        validation_weights: Weight of every validation row in a mean loss: its trained tokens, or 1; empty where the
            journal does not have them.
        evaluation_order: Indices of the validation rows in the order of evaluation, of which an evaluation takes the
            first; empty where every evaluation is on all rows.
        notes: Notices about the data, the model and the settings, as sentences.
        packing: The settings that decide which jobs share a forward pass, by key of the task file, and the ``device``;
            None where the journal does not have it.
        base: Fingerprint and precision of the base model; None where the journal does not have it.
        references: Of a method that needs reference log-probs, how they were found; None elsewhere.
        gpu_hour_price: Price of an hour of one GPU, where the task has a budget of money (``search.budget``); None
            elsewhere.
        init_adapter: The saved adapter that every job begins with; None where they begin with new ones.
        refit: The winner of another run that is trained again on all rows, without validation; None elsewhere.
        fused: How many modules of the base model are fused kernels, by operation, and ``kept``: why others
            are not, by class, or under ``cross_entropy`` (the losses of tokens), ``layers`` and ``all``; None where the
            journal does not have it.
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
    validation_weights: tuple[float, ...] = ()
    evaluation_order: tuple[int, ...] = ()
    notes: tuple[str, ...] = field(default=(), metadata=wire(always=True))
    packing: Mapping[str, Any] | None = None
    base: BaseDescription | None = field(default=None, metadata=wire(damaged_is_none=True))
    references: ReferenceFact | None = None
    gpu_hour_price: float | None = None
    init_adapter: StartFact | None = None
    refit: RefitFact | None = None
    fused: Mapping[str, Any] | None = None
    format: int = field(default=FORMAT, metadata=wire(if_absent=1, always=True))

    @property
    def ordered_weights(self) -> tuple[float, ...]:
        """Weights of the validation rows in the order of evaluation; empty where there is none."""
        return tuple(self.validation_weights[row] for row in self.evaluation_order)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResumed:
    """A process resumes the run; events after the last checkpoint are cut. After ``task_completed``, which is kept, the
    finished run trains further jobs, and another ``task_completed`` will follow.

    Attributes:
        notes: What was lost, and other notices, as sentences.
        versions: As of ``task_started``.
        max_slots: Slots of all ranks from now on; None where the journal does not have it: as before.
        num_ranks: Processes that train the task from now on; None where the journal does not have it: as before.
        base: As of ``task_started``, only where the run began with a version that did not write it.
        fused: As of ``task_started``.
    """

    notes: tuple[str, ...] = field(metadata=wire(if_absent=[]))
    versions: Mapping[str, str | None] = field(metadata=wire(if_absent={}))
    max_slots: int | None = field(metadata=wire(if_absent=None))
    num_ranks: int | None = field(metadata=wire(if_absent=None))
    base: BaseDescription | None = field(default=None, metadata=wire(damaged_is_none=True))
    fused: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileMeasured:
    """The measurements of the task, of this or an earlier run, its packing and its expected duration.

    Attributes:
        is_cached: The profile is from an earlier run.
        profile_s: Duration of the measurement, in seconds.
        memory: Memory model, in bytes.
        throughput: Throughput model, in seconds.
        slot_bytes: Memory of one slot.
        max_slots: Slots of the bank.
        max_tokens_per_step: Tokens of a step of all residents, at most.
        max_tokens_per_pass: Tokens of a micro-batch, at most.
        gradient_checkpointing: Whether activations are computed again in the backward pass.
        peak_bytes: Expected peak of memory.
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
class KernelsCompiled:
    """Kernels of the task are compiled before its first step, those that were compiled before not counted.

    Attributes:
        done: How many are compiled.
        total: How many there are.
        duration_s: Seconds since the first was begun.
    """

    done: int
    total: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseEvaluated:
    """The evaluation of what jobs begin with, before the first step: of the frozen base, or of ``init_adapter`` on it.

    Attributes:
        values: One entry for all jobs that have the same loss.
    """

    values: tuple[StartMeasurement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupEnded:
    """Jobs were ranked at a rung.

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
class RungScored:
    """The answers of the jobs that stand at a rung were scored, before it ranks them; or the scorer failed, and the
    metric ranks them.

    Attributes:
        rung: Its position in the early-exit settings, from 0.
        progress: Share of a job's own steps at which it ranks, in (0, 1].
        scores: Score of each job, by which the rung ranks. Empty where the scorer failed.
        scorer: Name of the scorer.
        failure: Why the scorer failed; empty where it did not.
    """

    rung: int
    progress: float
    scores: tuple[FinalistScore, ...]
    scorer: str
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRefused:
    """A user's command could not be carried out.

    Attributes:
        command: Id of the command.
        job: The job that it names.
        why: The reason, as a sentence.
    """

    command: str
    job: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """Memory ran out; the limit is lowered and the step is tried again. No work of earlier steps is lost.

    Attributes:
        phase: ``forward``, ``backward``, ``update``, ``evaluation`` or ``bank``.
        residents: Jobs with rows in the micro-batch, or in the bank, that did not fit.
        num_tokens: Tokens of the micro-batch that did not fit; 0 where it was other work.
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
    """Fewer jobs are left than ranks: the expected durations of the rest with other numbers of GPUs.

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
        jobs: The saved states, by job id, without jobs that have not begun.
        time_s: Seconds that the task has spent on ``training``, ``evaluation`` and ``saving`` since it began, those
            before an interruption included; empty where the journal does not have them.
    """

    jobs: Mapping[str, SavedJob]
    time_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareReceived:
    """The task has trained beside others in one executor, and ends or is stopped; counted since it was attached.

    Attributes:
        num_steps: Steps in which it and at least one other could train.
        num_tokens: Tokens that it trained in them.
        share: Its share of all tokens of these steps, in [0, 1].
        due_share: The share that was due to it by its weight, in [0, 1].
    """

    num_steps: int
    num_tokens: int
    share: float
    due_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInterrupted:
    """The run was stopped by Ctrl-C or SIGTERM, with everything saved.

    Attributes:
        training: Jobs that still have to train.
    """

    training: tuple[str, ...] = field(metadata=wire(if_absent=[]))


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalistsJudged:
    """The answers of the finalists were scored, where ``select_by`` is not ``metric``; or the scorer failed, and the
    metric chooses.

    Attributes:
        scores: Score of each finalist; best by the metric first. Empty where the scorer failed.
        scorer: Name of the scorer, or ``eval_accuracy``; empty in journals of version 0.1, which know only that.
        failure: Why the scorer failed; empty where it did not.
    """

    scores: tuple[FinalistScore, ...]
    scorer: str = ""
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesGenerated:
    """The prompts of the first validation rows were continued greedily by the base, the best adapter and that of the
    next best job, where ``num_samples`` is not 0; or the generation failed.

    Attributes:
        samples: One for each prompt; empty where the generation failed.
        failure: Why it failed; empty where it did not.
    """

    samples: tuple[Sample, ...]
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterChecked:
    """Whether PEFT, where it is installed, loads the best adapter as it was trained.

    Attributes:
        job: Job of the adapter.
        status: ``equal``, ``different`` (PEFT gives other logits, or cannot load it) or ``unchecked``.
        why: The reason of ``different`` or ``unchecked``; empty elsewhere.
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
    """The last event: the best job, and the cost of the task. Where a finished run was given further jobs, the last of
    several counts.

    Attributes:
        best_job: The job whose adapter was chosen.
        best_validation_loss: Its loss, nats per token; not a number where there was no validation.
        samples_trained: Training rows that all jobs saw.
        samples_budgeted: Rows that they would have seen without early exit.
        within_noise: Jobs whose metric is within noise of the winner's on so many validation rows.
        time_s: As in ``CheckpointSaved``.
    """

    best_job: str
    best_validation_loss: float = field(metadata=wire(if_absent=None))
    samples_trained: int = field(metadata=wire(if_absent=0))
    samples_budgeted: int = field(metadata=wire(if_absent=0))
    within_noise: tuple[TiedJob, ...] = ()
    time_s: Mapping[str, float] = field(default_factory=dict)


RunEvent: TypeAlias = (
    TaskStarted
    | TaskResumed
    | ProfileMeasured
    | KernelsCompiled
    | BaseEvaluated
    | JobAdmitted
    | JobResumed
    | TrainSteps
    | JobEvaluated
    | BestMeasured
    | JobParked
    | RungScored
    | WarmupEnded
    | JobExited
    | JobCompleted
    | JobAdded
    | JobReopened
    | CommandRefused
    | OutOfMemory
    | GpusOffered
    | CheckpointSaved
    | ShareReceived
    | TaskInterrupted
    | FinalistsJudged
    | SamplesGenerated
    | AdapterChecked
    | TaskCompleted
)
