"""The events of a run as a whole.

Steps are optimizer steps of one job, counted from 1. Losses are means in nats per trained token; for pairs, in the unit
of their loss. Durations are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from alto.records import FinalistScore, MemoryProfile, Sample, Throughput
from alto.runs.events.facts import (
    BaseDescription,
    JobDescription,
    ReferenceFact,
    RefitFact,
    RunEvent,
    SavedJob,
    StartFact,
    StartMeasurement,
    TiedJob,
    wire,
)

FORMAT = 2
"""Version of the journal format that is written; a journal without one has version 1, the format of ALTO 0.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStarted(RunEvent):
    """The first event: the resolved task, and all its jobs.

    Attributes:
        task: Name of the task.
        model: Base model as named in the task.
        base_model: Folder or hub id from which it was loaded.
        dataset: Training rows as named in the task.
        method: ``sft``, ``dpo``, or another registered objective.
        metric: The metric by which the task selects: ``loss``, or a metric of its method that is better when higher.
        num_train: Number of training rows.
        num_validation: Number of validation rows.
        data: Rows and tokens of every split, the rows that were cut or left out, the ``form`` of the rows, whether
            their replies are lists of messages (``of_messages``), the ``max_length`` at which they are cut, a
            ``fingerprint`` of every token, one of training and validation rows (``train_validation_fingerprint``),
            one of validation rows (``validation_fingerprint``) and one of test rows (``test_fingerprint``).
        max_slots: Slots of all ranks.
        early_exit: Early-exit settings, as in the task file.
        device: Device of the first rank, for example ``cuda:0``.
        num_ranks: Number of processes that train the task.
        versions: Versions of Python and of packages, by name; None for a package that is not installed.
        jobs: All jobs, in the order of the task.
        eval_steps: Share of a job's own steps between two evaluations; None if the journal does not have it.
        validation_weights: Weight of every validation row in a mean loss: its trained tokens, or 1; empty if the
            journal does not have them.
        evaluation_order: Indices of the validation rows in the order of evaluation; an evaluation takes the first of
            them. Empty if every evaluation is on all rows.
        notes: Notices about the data, the model and the settings, as sentences.
        packing: The settings that decide which jobs share a forward pass, by key of the task file, the ``device``, and
            the number of CPU ``threads`` (None on a GPU); None if the journal does not have it.
        base: Fingerprint and precision of the base model; None if the journal does not have it.
        references: Origin of the reference log-probs; None if the method needs none.
        gpu_hour_price: Price of an hour of one GPU, if the task has a budget of money (``search.budget``); None
            otherwise.
        init_adapter: The saved adapter with which every job begins; None if jobs begin with new adapters.
        refit: The winner of another run that is trained again on all rows, without validation; None in other runs.
        fused: Number of modules of the base model that run as fused kernels, by operation; and ``kept``: why other
            modules do not, by class, or under ``cross_entropy`` (the losses of tokens), ``layers`` and ``all``. None if
            the journal does not have it.
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
    def num_threads(self) -> int | None:
        """Number of CPU threads of the run; None on a GPU, or if the journal has no valid number."""
        found = (self.packing or {}).get("threads")
        return found if isinstance(found, int) and found > 0 else None

    @property
    def ordered_weights(self) -> tuple[float, ...]:
        """Weights of the validation rows in the order of evaluation; empty if there is no such order."""
        return tuple(self.validation_weights[row] for row in self.evaluation_order)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResumed(RunEvent):
    """A process resumes the run; events after the last checkpoint are cut. If it follows ``task_completed``, which is
    kept, the finished run trains further jobs, and another ``task_completed`` will follow.

    Attributes:
        notes: Notices as sentences, for example about events that a damaged journal lost.
        versions: Same as in ``task_started``.
        max_slots: Slots of all ranks from now on; None if the journal does not have it: the number is unchanged.
        num_ranks: Processes that train the task from now on; None if the journal does not have it: the number is
            unchanged.
        base: Same as in ``task_started``; only if the run began with a version that did not write it.
        fused: Same as in ``task_started``.
    """

    notes: tuple[str, ...] = field(metadata=wire(if_absent=[]))
    versions: Mapping[str, str | None] = field(metadata=wire(if_absent={}))
    max_slots: int | None = field(metadata=wire(if_absent=None))
    num_ranks: int | None = field(metadata=wire(if_absent=None))
    base: BaseDescription | None = field(default=None, metadata=wire(damaged_is_none=True))
    fused: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileMeasured(RunEvent):
    """The measurements of the task, made in this or an earlier run, its packing and its expected duration.

    Attributes:
        is_cached: Whether the profile is from an earlier run.
        profile_s: Duration of the measurement, in seconds.
        memory: Memory model, in bytes.
        throughput: Throughput model, in seconds.
        slot_bytes: Memory of one slot.
        max_slots: Slots of the bank.
        max_tokens_per_step: Maximum number of tokens of a step of all residents.
        max_tokens_per_pass: Maximum number of tokens of a micro-batch.
        gradient_checkpointing: Whether activations are computed again in the backward pass.
        peak_bytes: Expected peak memory.
        duration_s: Seconds of training and evaluation if no job ends early.
        expected_duration_s: Expected seconds with the rungs of early exit.
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
class KernelsCompiled(RunEvent):
    """Kernels of the task are compiled before its first step; kernels compiled earlier are not counted.

    Attributes:
        done: Number of compiled kernels.
        total: Number of kernels to compile.
        duration_s: Seconds since the first compilation began.
    """

    done: int
    total: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseEvaluated(RunEvent):
    """The evaluation of the starting point of jobs before the first step: the frozen base, or ``init_adapter`` on it.

    Attributes:
        values: One entry for each group of jobs with the same loss.
    """

    values: tuple[StartMeasurement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupEnded(RunEvent):
    """Jobs were ranked at a rung.

    Attributes:
        rung: Its position in the early-exit settings, from 0.
        progress: Share of a job's own steps at which the rung ranks, in (0, 1].
        kept: Jobs that continue or keep their place, best first.
        dropped: Jobs that end at this rung.
    """

    rung: int = field(metadata=wire(if_absent=0))
    progress: float = field(metadata=wire(if_absent=None))
    kept: tuple[str, ...] = field(metadata=wire(if_absent=[]))
    dropped: tuple[str, ...] = field(metadata=wire(if_absent=[]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RungScored(RunEvent):
    """The answers of the jobs at a rung were scored, before the rung ranks the jobs; or the scorer failed, and the
    metric ranks them.

    Attributes:
        rung: Its position in the early-exit settings, from 0.
        progress: Share of a job's own steps at which the rung ranks, in (0, 1].
        scores: Score of each job, by which the rung ranks; empty if the scorer failed.
        scorer: Name of the scorer.
        failure: Why the scorer failed; empty if it did not.
    """

    rung: int
    progress: float
    scores: tuple[FinalistScore, ...]
    scorer: str
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRefused(RunEvent):
    """A user's command could not be carried out.

    Attributes:
        command: Id of the command.
        job: Job named in the command.
        why: The reason, as a sentence.
    """

    command: str
    job: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory(RunEvent):
    """Memory ran out; the limit is lowered and the step is tried again. No work of earlier steps is lost.

    Attributes:
        phase: ``forward``, ``backward``, ``update``, ``evaluation`` or ``bank``.
        residents: Jobs with rows in the micro-batch, or in the bank, that did not fit.
        num_tokens: Tokens of the micro-batch that did not fit; 0 if the failed work was not a micro-batch.
        max_tokens_per_pass: Maximum number of tokens of a micro-batch from now on.
        num_slots: Slots of the bank from now on; None if the number is unchanged.
    """

    phase: str = field(metadata=wire(if_absent=""))
    residents: tuple[str, ...] = field(metadata=wire(if_absent=[]))
    num_tokens: int = field(metadata=wire(if_absent=0))
    max_tokens_per_pass: int = field(metadata=wire(if_absent=0))
    num_slots: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusOffered(RunEvent):
    """Fewer jobs than ranks remain: the expected durations of the remaining jobs on fewer GPUs and on all GPUs.

    Attributes:
        num_gpus: Smaller number of GPUs: the number of remaining jobs.
        duration_s: Seconds on ``num_gpus`` GPUs, one job on each.
        data_parallel_duration_s: Seconds on all GPUs of the task, with every job on all of them.
    """

    num_gpus: int
    duration_s: float
    data_parallel_duration_s: float = field(metadata=wire(aliases=("spread_duration_s",)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(RunEvent):
    """A checkpoint was saved: all events up to here survive a kill.

    Attributes:
        jobs: The saved states by job id, without jobs that have not begun.
        time_s: Seconds that the task has spent on ``training``, ``evaluation`` and ``saving`` since it began, including
            the time before interruptions; empty if the journal does not have them.
    """

    jobs: Mapping[str, SavedJob]
    time_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareReceived(RunEvent):
    """The share of the training that a task received since it joined an executor with other tasks. Written when the
    task ends or is stopped.

    Attributes:
        num_steps: Steps in which this task and at least one other task could train.
        num_tokens: Tokens that this task trained in these steps.
        share: Its share of all tokens of these steps, in [0, 1].
        due_share: The share that the task should have had by its weight, in [0, 1].
    """

    num_steps: int
    num_tokens: int
    share: float
    due_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInterrupted(RunEvent):
    """The run was stopped by Ctrl-C or SIGTERM, with everything saved.

    Attributes:
        training: Jobs that have not finished training.
    """

    training: tuple[str, ...] = field(metadata=wire(if_absent=[]))


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalistsJudged(RunEvent):
    """The answers of the finalists were scored, because ``select_by`` is not ``metric``; or the scorer failed, and the
    metric chooses.

    Attributes:
        scores: Score of each finalist, best by the metric first; empty if the scorer failed.
        scorer: Name of the scorer, or ``eval_accuracy``; empty in journals of version 0.1, which know only
            ``eval_accuracy``.
        failure: Why the scorer failed; empty if it did not.
    """

    scores: tuple[FinalistScore, ...]
    scorer: str = ""
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesGenerated(RunEvent):
    """The base model, the best adapter and the next best job's adapter generated texts for the prompts of the first
    validation rows, because ``num_samples`` is not 0; or the generation failed.

    Attributes:
        samples: One for each prompt; empty if the generation failed.
        failure: Why it failed; empty if it did not.
    """

    samples: tuple[Sample, ...]
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterChecked(RunEvent):
    """The result of the check whether PEFT, if it is installed, loads the best adapter as it was trained.

    Attributes:
        job: Job of the adapter.
        status: ``equal``, ``different`` (PEFT gives other logits, or cannot load it) or ``unchecked``.
        why: The reason for ``different`` or ``unchecked``; empty otherwise.
        difference: Relative difference, in norm, between PEFT's and ALTO's logits of a few tokens; None if PEFT gave
            none.
        peft: Version of PEFT; None if it is not installed.
    """

    job: str = field(metadata=wire(if_absent=""))
    status: Literal["equal", "different", "unchecked"]
    why: str = field(metadata=wire(if_absent=""))
    difference: float | None = field(metadata=wire(if_absent=None))
    peft: str | None = field(metadata=wire(if_absent=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCompleted(RunEvent):
    """The last event: the best job, and the cost of the task. If a finished run trained further jobs, the last of
    several such events counts.

    Attributes:
        best_job: The job whose adapter was chosen.
        best_validation_loss: Its loss, nats per token; NaN if there was no validation.
        samples_trained: Training rows that all jobs saw.
        samples_budgeted: Rows that they would have seen without early exit.
        within_noise: Jobs whose metric is within noise of the winner's, given the number of validation rows.
        time_s: Same as in ``checkpoint``.
    """

    best_job: str
    best_validation_loss: float = field(metadata=wire(if_absent=None))
    samples_trained: int = field(metadata=wire(if_absent=0))
    samples_budgeted: int = field(metadata=wire(if_absent=0))
    within_noise: tuple[TiedJob, ...] = ()
    time_s: Mapping[str, float] = field(default_factory=dict)
