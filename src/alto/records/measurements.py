"""Memory and time of a task: measurements and models."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from alto.records.jobs import Rung

__all__ = [
    "UNSTEADY",
    "MemoryPoint",
    "MemoryProfile",
    "PackingForecast",
    "TaskPlan",
    "Throughput",
    "ThroughputPoint",
]

UNSTEADY = 0.25
"""Spread of repeated steps from which on other programs must have used the machine while it was measured."""


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
    """The memory model of a step: ``fixed_bytes + bytes_per_token * tokens``, plus the bank's bytes.

    Attributes:
        fixed_bytes: Bytes that do not depend on the tokens.
        bytes_per_token: Bytes per token of the step.
        capacity_bytes: Memory of the device.
        margin: Share of the capacity that may be planned with, in (0, 1].
        error_median: Median error of the memory estimate at ``points``, relative to the measurement.
        error_worst: The largest of these errors.
        points: The measurements.
    """

    fixed_bytes: float
    bytes_per_token: float
    capacity_bytes: int
    margin: float
    error_median: float
    error_worst: float
    points: tuple[MemoryPoint, ...]

    def peak_bytes(self, num_tokens: int, bank_bytes: int) -> int:
        """Peak of a micro-batch of ``num_tokens`` beside a bank of that size."""
        return round(self.fixed_bytes + self.bytes_per_token * num_tokens) + bank_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingForecast:
    """The memory and speed of a packing: a bank of ``num_slots`` slots and micro-batches of ``num_tokens`` tokens.

    Attributes:
        fits: Whether the peak is within the share of the memory that is planned with.
        tokens_per_s: Tokens per second of such steps.
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
        row_tokens: Tokens of the training rows: mean and largest.
        slot_bytes: Memory of one slot: the largest adapter, its gradient and its optimizer's state.
        max_slots, max_tokens_per_step, max_tokens_per_pass, gradient_checkpointing: Limits that the task will run with.
        peak_bytes: Expected peak of memory.
        why_one_slot: Why there is one slot only, as a phrase; empty where there are more.
        packings: Other packings, for comparison.
        duration_s: Seconds of training and evaluation without early exit: an upper bound.
        expected_duration_s: Seconds with the rungs of its early exit; the same where it has none.
        expected_step_s: Of these, the seconds that steps take whatever they train: tasks that train together in one
            process pay them once.
        is_at_budget: ``duration_s`` is what the task's budget of time or money allows; without it, it would be longer.
        modules: Digest of the names of all modules that its jobs target.
        is_cached: The profile is from an earlier run.
        profile_s: Duration of the measurement, in seconds.
        notes: Notices about the data, the model and the measurement, as sentences.
        profile: Name of the measurement in the cache.
        disk_bytes: Most bytes that the states of its jobs take on disk while it trains.
        disk_free_bytes: Bytes that are free where its run would be; None where that is not known.
        rungs: Rungs of a preset whose numbers of jobs were lowered to fit a budget of time; empty where they were not.
        forward_share: Time to evaluate a token over the time to train it.
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
        """Largest and expected cost of the task, in the currency of the price."""
        return self.duration_s / 3600 * price_per_hour, self.expected_duration_s / 3600 * price_per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputPoint:
    """The duration of one measured training step.

    Attributes:
        num_jobs: Jobs that took the step together.
        num_tokens: Tokens of all of them.
        duration_s: Seconds: the median of several such steps.
        spread: How much longer the median took than the fastest tenth, relative to that: the busier the machine, the
            larger; 0 where it is not known.
    """

    num_jobs: int
    num_tokens: int
    duration_s: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """The throughput model, the duration of a training step: ``step_s + job_s * jobs + token_s * tokens`` seconds.

    Attributes:
        step_s: Seconds of any step.
        job_s: Seconds that each job of the step adds.
        token_s: Seconds that each token of the step adds.
        eval_token_s: Seconds per validation token of an evaluation.
        points: The measurements.
    """

    step_s: float
    job_s: float
    token_s: float
    eval_token_s: float
    points: tuple[ThroughputPoint, ...]

    @property
    def spread(self) -> float:
        """Median of the spreads of the measurements; 0 where there are none."""
        return median([point.spread for point in self.points]) if self.points else 0.0

    @property
    def is_unsteady(self) -> bool:
        """Whether the machine was busy with other programs while it was measured, so that the durations are rough."""
        return self.spread >= UNSTEADY

    def duration_s(self, num_jobs: int, num_tokens: int) -> float:
        """Seconds of one step of ``num_jobs`` jobs with ``num_tokens`` tokens in all."""
        return self.step_s + self.job_s * num_jobs + self.token_s * num_tokens
