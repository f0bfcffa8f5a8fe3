"""The facts that packages exchange: frozen, plain, no torch.

A record says what happened or what was decided; it has no behaviour beyond reading itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeAlias

__all__ = [
    "MAX_DURATION_S",
    "MIN_DURATION_S",
    "AdapterEvaluation",
    "DataPreview",
    "Evaluation",
    "EvaluationResult",
    "ExitDecision",
    "ExitReason",
    "FinalistScore",
    "GenerationBackend",
    "Gpu",
    "JobResult",
    "LossPoint",
    "MemoryPoint",
    "MemoryProfile",
    "Metric",
    "ModelLimits",
    "Node",
    "PackingForecast",
    "Placement",
    "Prediction",
    "PreviewExample",
    "Rung",
    "RungResult",
    "Schedule",
    "Segments",
    "SimulationOutcome",
    "Standing",
    "StartValue",
    "TaskPlan",
    "TaskResult",
    "Throughput",
    "ThroughputPoint",
    "exit_reason",
]

MIN_DURATION_S, MAX_DURATION_S = 1e-6, 1e12
"""Seconds that a task may be thought to take: with less or more, sums and shares of times round to nothing or have no
end."""


Metric = Literal["auto", "loss", "exact_match", "preference"]
"""What is measured of an adapter; ``auto`` is what the rows allow."""

GenerationBackend = Literal["alto", "vllm"]
"""Who writes the answers that are judged."""


class ExitReason(StrEnum):
    """Why a job ended before its last step. A rule of a user has a reason of its own beside these."""

    DIVERGING = "diverging"
    OVERFITTING = "overfitting"
    UNDERPERFORMING = "underperforming"
    STOPPED = "stopped"
    FAILED = "failed"


def exit_reason(text: str) -> str:
    """The reason that a journal spells ``text``: an `ExitReason`, or that of a user's rule as it stands."""
    return ExitReason(text) if text in list(ExitReason) else text


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPoint:
    """What is known of a job at one of its evaluations.

    Attributes:
        job: Job id.
        step: Optimizer steps done so far (the first evaluation cannot be earlier than step 1).
        total_steps: Optimizer steps of the job if nothing ends it early.
        train_ema: Exponentially smoothed training loss after ``step`` steps.
        validation_loss: Loss on the validation set, not smoothed: nats per token; of pairs, what their loss gives.
        score: Value of the metric that the task chooses by, more is better; 0 for all where that is the loss.
        score_rows: Its value on every validation row, in their order; empty where the metric is the loss or is known as
            a mean only.
        loss_scale: Names what decides the scale of the loss; losses of other scales cannot be compared as they are.
        start_loss: What validation gave before the first step; None where it is not known.
    """

    job: str
    step: int
    total_steps: int
    train_ema: float
    validation_loss: float
    score: float = 0.0
    score_rows: tuple[float, ...] = ()
    loss_scale: str = ""
    start_loss: float | None = None

    @property
    def progress(self) -> float:
        """Share of the job's own steps done, in (0, 1]."""
        return self.step / self.total_steps

    @property
    def sort_key(self) -> tuple[float, float]:
        """Orders evaluations, the least first: by score, and where scores are equal by validation loss."""
        return (-self.score, self.validation_loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartValue:
    """What a job's validation gives before its first step, where the adapter changes nothing: that of the frozen base.

    Attributes:
        validation_loss, score, score_rows: As in :class:`LossPoint`.
    """

    validation_loss: float
    score: float = 0.0
    score_rows: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitDecision:
    """A verdict on one job: end it at ``step`` for ``reason``, because of ``evidence``.

    ``reason`` is an `ExitReason`, or that of a user's rule. ``evidence`` holds the numbers the verdict was based on
    (slopes, gaps, ranks, thresholds).
    """

    job: str
    step: int
    reason: str
    evidence: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A point of selection: at ``progress`` of its steps every job is ranked, and a share of the jobs goes on.

    Attributes:
        progress: Share of a job's own steps, in (0, 1].
        keep: Share of the jobs that go on, of those that the rung before left, in (0, 1].
        min_kept: So many go on at least, as far as there are so many.
        max_kept: So many go on at most; None sets no limit.
    """

    progress: float
    keep: float
    min_kept: int = 1
    max_kept: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a job stands when a rung ranks it.

    Attributes:
        job: Job id.
        step: Steps the job has done.
        validation_loss: Of the evaluation it competes with: that at the rung while it still trains, that of its best
            checkpoint when it has ended. NaN or infinity ranks last.
        score, score_rows, loss_scale, start_loss: Of the same evaluation, see :class:`LossPoint`.
        is_training: Whether the job would go on if kept. A job that has ended (overfitting, or all its
            steps done) still competes for a place with its best checkpoint.
    """

    job: str
    step: int
    validation_loss: float
    score: float = 0.0
    score_rows: tuple[float, ...] = ()
    loss_scale: str = ""
    start_loss: float | None = None
    is_training: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RungResult:
    """The outcome of a rung: who keeps a place, and a verdict for every training job that does not.

    ``kept`` is ordered best first and may hold jobs that have already ended.
    """

    kept: tuple[str, ...]
    dropped: tuple[ExitDecision, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """How one job ended.

    Attributes:
        job: Job id.
        config: The job's resolved configuration, canonical keys.
        steps: Steps done; ``total_steps`` if nothing ended it early.
        exit_reason: An `ExitReason`, or that of a user's rule; None when the job did all its steps.
        best_step: Step of its best evaluation by the task's metric; 0 if it was never evaluated.
        best_validation_loss: The loss there; infinity if it was never evaluated with a finite loss.
        samples_trained: Rows seen in training, counting repeats over epochs.
        samples_budgeted: Rows the job would have seen without early exit.
        best_metrics: What its method measured there beside the loss.
    """

    job: str
    config: Mapping[str, Any]
    steps: int
    total_steps: int
    exit_reason: str | None
    exit_evidence: Mapping[str, float]
    best_step: int
    best_validation_loss: float
    samples_trained: int
    samples_budgeted: int
    best_metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCheck:
    """Whether PEFT makes of the best adapter what was trained.

    Attributes:
        status: ``equal``; ``different``: PEFT gives other logits, or cannot load it; ``unchecked``.
        why: Of ``different`` and ``unchecked``, the reason.
        difference: Between PEFT's and ALTO's logits of a few tokens, relative, in norm; None where PEFT gave none.
        peft: Its version; None where it is not there.
    """

    status: Literal["equal", "different", "unchecked"]
    why: str = ""
    difference: float | None = None
    peft: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalistScore:
    """How many of the validation questions a finalist answered right.

    Attributes:
        job: Job id.
        num_correct: Questions whose answer was right.
        num_questions: Questions that were asked.
    """

    job: str
    num_correct: int
    num_questions: int

    @property
    def exact_match(self) -> float:
        """Their share, in [0, 1]."""
        return self.num_correct / self.num_questions


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """How one task ended: its best job, every job, and where the run lies on disk.

    Attributes:
        best_validation_loss: Of the adapter that was chosen.
        metric: What it was chosen by: ``loss``, or something the task's method measures.
        best_metrics: What the method measured of it beside the loss.
        finalists: How those answered among whom ``select_by: eval_accuracy`` chose, best by the metric first; empty
            where it did not.
        notes: What a user should know of how it was chosen, in sentences.
        adapter_check: Whether PEFT loads the best adapter as it was trained; None of a run that knows nothing of it.
        notices: What did not come out as it should beside the result, and what to do about it, in sentences: that there
            is no report.
    """

    task: str
    run_dir: str
    adapter_dir: str
    best_job: str
    best_validation_loss: float
    jobs: tuple[JobResult, ...]
    duration_s: float
    metric: str = "loss"
    best_metrics: Mapping[str, float] = field(default_factory=dict)
    finalists: tuple[FinalistScore, ...] = ()
    notes: tuple[str, ...] = ()
    adapter_check: AdapterCheck | None = None
    notices: tuple[str, ...] = ()

    @property
    def samples_trained(self) -> int:
        return sum(job.samples_trained for job in self.jobs)

    @property
    def samples_budgeted(self) -> int:
        return sum(job.samples_budgeted for job in self.jobs)

    @property
    def samples_saved(self) -> float:
        """Share of the budgeted samples that early exit did not train."""
        return 1.0 - self.samples_trained / self.samples_budgeted


Segments: TypeAlias = tuple[tuple[str, bool], ...]
"""A text in order, special tokens written out, each part with whether its tokens are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewExample:
    """One training row as the model sees it.

    Attributes:
        num_tokens: After it was cut.
        segments: Its text; of a pair, what both conversations begin with.
        chosen, rejected: How the conversations of a pair go on; nothing elsewhere.
    """

    num_tokens: int
    segments: Segments
    chosen: Segments = ()
    rejected: Segments = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What a model can be given; None where it sets no limit, or none is known.

    Attributes:
        max_positions: Tokens of a sequence.
        vocab_size: Rows of its embedding: token ids are below it.
    """

    max_positions: int | None = None
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPreview:
    """What a task's data is before anything is trained.

    Attributes:
        dataset, model: As the task names them; of the model only the tokenizer is used.
        form: The form of the rows that was named, or recognised by their columns.
        columns: Which column plays which role.
        max_length: Tokens at which rows are cut.
        counts: Rows and tokens of both splits, and what was cut or left out.
        row_tokens: Tokens of the training rows after cutting, of a pair those of either conversation: smallest, median,
            largest.
        notes: What a user should know about the data and the model, in sentences.
        examples: The first training rows.
    """

    dataset: str
    model: str
    form: str
    columns: Mapping[str, str]
    max_length: int
    counts: Mapping[str, int]
    row_tokens: tuple[int, float, int]
    notes: tuple[str, ...]
    examples: tuple[PreviewExample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What one set of weights was found to be worth on held-out rows; what was not measured is None.

    Attributes:
        dataset: The rows, as the user or the task names them.
        num_rows: How many of them were used.
        loss: Nats per trained token.
        exact_match: Share of the rows, in [0, 1], whose final answer was right.
        num_correct: How many rows that is.
        reward_accuracy: Share of the pairs, in [0, 1], whose chosen reply gained more on the base than the other.
        reward_margin: By how many nats more, in the mean: rewards at beta 1.
        settings: All else that decides the numbers: which weights, on which base, measured how.
        date: When, ISO 8601 in UTC.
    """

    dataset: str
    num_rows: int
    loss: float | None
    exact_match: float | None
    num_correct: int | None
    settings: Mapping[str, Any]
    date: str
    reward_accuracy: float | None = None
    reward_margin: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a model wrote for one held-out row.

    Attributes:
        weights: The adapter's name, or ``base`` for the base model alone.
        prompt: The text as the model saw it.
        reference: What the row wants.
        generated: What the model wrote, without the token that ended it.
        extracted: The final answer in that, None where there is none.
        correct: Whether it is the reference's.
    """

    weights: str
    prompt: str
    reference: str
    generated: str
    extracted: str | None
    correct: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEvaluation:
    """The numbers of one adapter.

    Attributes:
        name: A job of its run, ``best`` for the run's best, or the folder as it was given.
    """

    name: str
    adapter_dir: str
    evaluation: Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """The numbers of adapters, those of their base model alone where they were asked for, and every text that was
    judged."""

    adapters: tuple[AdapterEvaluation, ...]
    baseline: Evaluation | None
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True, slots=True, order=True)
class Gpu:
    """One device of a cluster; on a machine without GPUs, one of the CPU slots that stand for them."""

    node: str
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of a cluster.

    Attributes:
        name: Unique in the cluster.
        gpus: Numbers of its devices; a device that was lost leaves a gap.
    """

    name: str
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where and when one task runs.

    Attributes:
        task: Name of the task.
        gpus: In rising order. All on one node wherever a node is large enough.
        start_s: Seconds after the schedule was made.
        duration_s: Seconds, as estimated.
    """

    task: str
    gpus: tuple[Gpu, ...]
    start_s: float
    duration_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Placements of a set of tasks, in the order of their starts.

    Attributes:
        method: Who made it: ``cp-sat``, ``milp``, ``fifo``, ``sjf`` or ``lpt``.
        status: ``optimal`` (makespan proven), ``feasible`` (the solver ran out of time) or ``heuristic``.
        bound_s: No schedule of these tasks ends before.
        notice: Why it is not what was asked for; empty where it is.
    """

    method: str
    status: Literal["optimal", "feasible", "heuristic"]
    placements: tuple[Placement, ...]
    bound_s: float
    notice: str = ""

    @property
    def makespan_s(self) -> float:
        """End of the last task; 0 where there is none."""
        return max((placement.end_s for placement in self.placements), default=0.0)

    @property
    def gap(self) -> float:
        """How far the makespan may be above the least possible one, relative to that; 0 where it is proven."""
        return self.makespan_s / self.bound_s - 1.0 if self.bound_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOutcome:
    """How one method fared with a simulated set of tasks.

    Attributes:
        label: In the paper's terms: ``B`` for batching alone, first come first served; ``+S`` with a scheduler,
            ``+EE`` with early exit.
        planner: What made the plans, where that is not the method alone.
        makespan_s: From the first arrival to the end of the last task.
        mean_completion_s, p99_completion_s: From arrival to end, of the tasks that finished; 0 where none did.
        utilisation: Share of the time of the GPUs that were there until the end that some task had, in [0, 1].
        num_replans, num_attempts: Plans made, executors started.
        num_finished, num_failed: Tasks.
        planned: Where every task was to run when it was first planned, times from the first arrival.
        actual: Where every attempt did run.
    """

    method: str
    early_exit: bool
    label: str
    planner: str
    makespan_s: float
    mean_completion_s: float
    p99_completion_s: float
    utilisation: float
    num_replans: int
    num_attempts: int
    num_finished: int
    num_failed: int
    planned: tuple[Placement, ...]
    actual: tuple[Placement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """The peak of one measured step.

    Attributes:
        num_jobs: Jobs that took the step together.
        num_tokens: Tokens of all of them.
        peak_bytes: Largest amount of memory in use, without the bank, whose bytes are known exactly.
    """

    num_jobs: int
    num_tokens: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """What a step takes: ``fixed_bytes + bytes_per_token * tokens``, and the bank's bytes on top.

    Attributes:
        fixed_bytes: What does not depend on the tokens.
        bytes_per_token: What each token of the step adds.
        capacity_bytes: Memory of the device.
        margin: Share of the capacity that may be planned with, in (0, 1].
        error_median: Median error of the model at ``points``, relative to what was measured.
        error_worst: The largest of these errors.
        points: What was measured.
    """

    fixed_bytes: float
    bytes_per_token: float
    capacity_bytes: int
    margin: float
    error_median: float
    error_worst: float
    points: tuple[MemoryPoint, ...]

    def peak_bytes(self, num_tokens: int, bank_bytes: int) -> int:
        """Peak of a pass of ``num_tokens`` beside a bank of that size."""
        return round(self.fixed_bytes + self.bytes_per_token * num_tokens) + bank_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingForecast:
    """What a packing takes: a bank of ``num_slots`` slots and passes of ``num_tokens`` tokens.

    Attributes:
        fits: Whether the peak is within the share of the memory that is planned with.
        tokens_per_s: Of steps of that many jobs and tokens.
    """

    num_slots: int
    num_tokens: int
    peak_bytes: int
    fits: bool
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """What is known of a task before it is trained.

    Attributes:
        num_parameters: Trainable parameters of the smallest and the largest adapter.
        row_tokens: Of the training rows: mean and largest.
        slot_bytes: Memory of one slot: the largest adapter, its gradient and its optimizer's state.
        max_slots, max_tokens_per_step, max_tokens_per_pass, gradient_checkpointing: What the task will run with.
        peak_bytes: Memory that comes to.
        packings: Others, for comparison.
        duration_s: Training and evaluation with early exit off: the most it can take.
        expected_duration_s: With the rungs of its early exit; the same where it has none.
        is_cached: The profile is from an earlier run.
        profile_s: What measuring it took, whenever that was.
        notes: What a user should know about the data and the model, in sentences.
    """

    task: str
    model: str
    device: str
    num_jobs: int
    num_parameters: tuple[int, int]
    row_tokens: tuple[float, int]
    slot_bytes: int
    max_slots: int
    max_tokens_per_step: int
    max_tokens_per_pass: int
    gradient_checkpointing: bool
    peak_bytes: int
    packings: tuple[PackingForecast, ...]
    memory: MemoryProfile
    throughput: Throughput
    duration_s: float
    expected_duration_s: float
    is_cached: bool
    profile_s: float
    notes: tuple[str, ...] = ()

    def cost(self, price_per_hour: float) -> tuple[float, float]:
        """What the task costs at most, and in expectation, in the currency of the price."""
        return self.duration_s / 3600 * price_per_hour, self.expected_duration_s / 3600 * price_per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputPoint:
    """The duration of one measured training step.

    Attributes:
        num_jobs: Jobs that took the step together.
        num_tokens: Tokens of all of them.
        duration_s: Seconds.
    """

    num_jobs: int
    num_tokens: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """How long a training step takes: ``step_s + job_s * jobs + token_s * tokens`` seconds.

    Attributes:
        step_s: Seconds of any step.
        job_s: Seconds that each job of the step adds.
        token_s: Seconds that each token of the step adds.
        eval_token_s: Seconds per validation token of an evaluation.
        points: What was measured.
    """

    step_s: float
    job_s: float
    token_s: float
    eval_token_s: float
    points: tuple[ThroughputPoint, ...]

    def duration_s(self, num_jobs: int, num_tokens: int) -> float:
        """Of one step of ``num_jobs`` jobs with ``num_tokens`` tokens in all."""
        return self.step_s + self.job_s * num_jobs + self.token_s * num_tokens
