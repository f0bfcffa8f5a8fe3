"""Memory and time of a task: measurements, and models fitted to them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from alto.records.jobs import Rung

UNSTEADY = 0.25
"""If the spread of repeated steps is at least this, other programs are assumed to have used the machine during the
measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """The memory peak of one measured step.

    Attributes:
        num_jobs: Number of jobs that took the step together.
        num_tokens: Number of tokens of all these jobs.
        peak_bytes: Peak of memory in use without the bank, because the size of the bank is known exactly.
    """

    num_jobs: int
    num_tokens: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """The memory model of a step: ``fixed_bytes + bytes_per_token * tokens``, plus the bank's bytes.

    Attributes:
        fixed_bytes: Bytes that do not depend on the number of tokens.
        bytes_per_token: Bytes per token of the step.
        capacity_bytes: Memory of the device.
        margin: Share of the capacity that plans may use, in (0, 1].
        error_median: Median error of the memory estimate at ``points``, relative to the measurement.
        error_worst: The largest of these errors.
    """

    fixed_bytes: float
    bytes_per_token: float
    capacity_bytes: int
    margin: float
    error_median: float
    error_worst: float
    points: tuple[MemoryPoint, ...]

    def peak_bytes(self, num_tokens: int, bank_bytes: int) -> int:
        """Return the memory peak of a micro-batch of ``num_tokens`` with a bank of ``bank_bytes``."""
        return round(self.fixed_bytes + self.bytes_per_token * num_tokens) + bank_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingForecast:
    """The memory and speed of a packing: a bank of ``num_slots`` slots and micro-batches of ``num_tokens`` tokens.

    Attributes:
        fits: Whether the peak is within the share of the memory that plans may use.
    """

    num_slots: int
    num_tokens: int
    peak_bytes: int
    fits: bool
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """The plan of a task before it is trained.

    Attributes:
        num_parameters: Trainable parameters of the smallest and the largest adapter.
        row_tokens: Mean and largest number of tokens of the training rows.
        slot_bytes: Memory of one slot: the largest adapter, its gradient and its optimizer state.
        max_slots, max_tokens_per_step, max_tokens_per_pass, gradient_checkpointing: Limits with which the task will
            run.
        peak_bytes: Expected memory peak.
        why_one_slot: Why there is only one slot, as a phrase; empty if there are more.
        packings: Other packings, for comparison.
        duration_s: Seconds of training and evaluation without early exit: an upper bound.
        expected_duration_s: Expected seconds with the rungs of early exit; equal to ``duration_s`` without them.
        expected_step_s: The part of ``expected_duration_s`` that the steps take regardless of how many tokens they
            train; tasks that train together in one process pay it once.
        is_at_budget: Whether the task's budget of time or money limits ``duration_s``.
        modules: Digest of the names of all modules that the jobs target.
        is_cached: Whether the measurement is from an earlier run.
        profile_s: Duration of the measurement, in seconds.
        notes: Notices about the data, the model and the measurement, as sentences.
        profile: Name of the measurement in the cache.
        disk_bytes: Maximum size of the jobs' states on disk during training.
        disk_free_bytes: Free bytes on the disk where the run would be; None if that is not known.
        rungs: Rungs of a preset whose numbers of jobs were lowered to fit a time budget; empty if they were not.
        forward_share: Time to evaluate a token, divided by the time to train it.
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
    expected_step_s: float
    modules: str
    is_cached: bool
    profile_s: float
    notes: tuple[str, ...] = ()
    why_one_slot: str = ""
    is_at_budget: bool = False
    profile: str = ""
    disk_bytes: int = 0
    disk_free_bytes: int | None = None
    rungs: tuple[Rung, ...] = ()
    forward_share: float = 0.0

    def cost(self, price_per_hour: float) -> tuple[float, float]:
        """Return the largest and the expected cost of the task, in the currency of ``price_per_hour``."""
        return self.duration_s / 3600 * price_per_hour, self.expected_duration_s / 3600 * price_per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputPoint:
    """The duration of one measured training step.

    Attributes:
        num_jobs: Number of jobs that took the step together.
        num_tokens: Number of tokens of all these jobs.
        duration_s: Median duration of several such steps, in seconds.
        spread: How much longer such a step took than on an idle machine, as a share of that time. It is estimated from
            the repeats (how far the median is above the fastest tenth) and from the time that threads waited for a CPU
            core; the larger value counts. 0 if it is not known.
    """

    num_jobs: int
    num_tokens: int
    duration_s: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadTime:
    """The duration of one training step with a number of CPU threads, in seconds."""

    num_threads: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """The model of a training step's duration: ``step_s + job_s * jobs + token_s * tokens`` seconds in one pass.

    Attributes:
        step_s: Fixed seconds of a pass.
        job_s: Seconds that each job of a pass adds.
        token_s: Seconds that each token of the step adds.
        eval_token_s: Seconds per validation token of an evaluation.
        num_threads: Number of CPU threads with which all durations were measured, the fastest number that was tried;
            None if no others were tried.
        pass_tokens: Largest number of tokens of one pass on all ranks together; a step of more tokens takes several
            passes. None if every step is one pass, as in the measurement.
    """

    step_s: float
    job_s: float
    token_s: float
    eval_token_s: float
    points: tuple[ThroughputPoint, ...]
    num_threads: int | None = None
    pass_tokens: int | None = None

    @property
    def spread(self) -> float:
        """Median spread of the measurements; 0 if there are none."""
        return median([point.spread for point in self.points]) if self.points else 0.0

    @property
    def is_unsteady(self) -> bool:
        """Whether other programs used the machine during the measurement, so that the durations are rough."""
        return self.spread >= UNSTEADY

    def duration_s(self, num_jobs: int, num_tokens: int) -> float:
        """Return the seconds of one step of ``num_jobs`` jobs with ``num_tokens`` tokens in total."""
        more_passes = 0 if self.pass_tokens is None else max(0, math.ceil(num_tokens / self.pass_tokens) - 1)
        # Every further pass has at least one more part of a job.
        return self.step_s * (1 + more_passes) + self.job_s * (num_jobs + more_passes) + self.token_s * num_tokens
