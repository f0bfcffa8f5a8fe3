"""What a task takes of memory and time."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MemoryPoint", "MemoryProfile", "PackingForecast", "TaskPlan", "Throughput", "ThroughputPoint"]


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
