"""The expected and the allowed duration of a measurement."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from alto.backbone import Backbone
from alto.executor.profiling.sketch import NUM_EVALUATED, RowLength
from alto.spec import Task

LEAST_TIMED_S, MOST_TIMES = 1.0, 16
"""Seconds for which a step is repeated, for a stable duration, and the largest number of repeats."""

NUM_SIZES = 2
"""Number of step sizes that are measured in any case, because the memory model and the throughput model need them."""

_LEAST_BUDGET_S = {"cpu": 8.0, "cuda": 60.0}
"""Smallest budget in seconds; larger on a GPU, where kernels are compiled before the first step."""

_BUDGET_FRACTION = 0.005
"""Budget as a share of the task's duration without early exit; at most a twentieth of its duration with early exit."""

_FLOPS_PER_TOKEN = 6
"""Floating-point operations per parameter and token in a training step: 2 forward, at most 4 backward."""

_USUAL_FLOPS = {"cpu": 2e10, "cuda": 5e13}
"""Guessed floating-point operations per second of one CPU core and of one GPU, used until a step has been measured."""


MAX_JOBS = 16
"""Largest number of jobs that are measured together; the cost of more jobs is extrapolated."""

_BATCH_SIZES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """A step size: ``num_jobs`` jobs that take a step of ``batch_size`` rows each."""

    num_jobs: int
    batch_size: int

    @property
    def num_rows(self) -> int:
        return self.num_jobs * self.batch_size


def step_shapes(num_jobs: int, largest_batch: int) -> tuple[StepShape, ...]:
    """Return the step sizes to measure. Each has about twice as many rows as the previous one. Small and large numbers
    of jobs alternate."""
    jobs = sorted({2**power for power in range(num_jobs.bit_length())} | {num_jobs})
    sizes = [size for size in _BATCH_SIZES if size <= largest_batch]
    by_rows: dict[int, list[StepShape]] = {}
    for count in jobs:
        for size in sizes:
            by_rows.setdefault(count * size, []).append(StepShape(num_jobs=count, batch_size=size))
    if len(by_rows) == 1:  # one job with one row per step, but a second size is needed
        by_rows[2] = [StepShape(num_jobs=1, batch_size=2)]
    chosen: list[StepShape] = []
    for rows, alike in sorted(by_rows.items()):
        is_last = rows == max(by_rows)
        if not chosen or rows >= 2 * chosen[-1].num_rows or is_last:
            chosen.append(alike[-1 if len(chosen) % 2 else 0])
    return tuple(chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringBudget:
    """The steps to be measured, and the time that they may take: a two-hundredth of the task's estimated duration, but
    at least eight seconds on a CPU and a minute on a GPU.

    Attributes:
        sizes: Expected tokens of the steps, in the order in which they are measured.
        eval_tokens: Tokens of the evaluation that is measured last.
        least_s: Smallest budget in seconds, for a task of any length.
        warms_up: Whether the first step of every size is not timed, because kernels are compiled for it.
    """

    sizes: tuple[int, ...]
    task_tokens: float
    eval_tokens: int
    least_s: float
    warms_up: bool

    @classmethod
    def of(
        cls,
        task: Task,
        lengths: Sequence[RowLength],
        *,
        num_rows: int,
        max_tokens: int,
        num_ranks: int,
        num_jobs: int,
        device: torch.device,
    ) -> Self:
        """Return the budget of a task.

        Args:
            num_rows: Number of rows of the training split.
            max_tokens: Largest number of tokens of a rank's step, except in the first two sizes.
            num_jobs: Number of jobs of a rank.
        """
        largest_batch = max(job.config.sequences_per_step for job in task.jobs)
        num_jobs = min(MAX_JOBS, num_jobs)
        mean = statistics.fmean(length.num_tokens for length in lengths)
        sequences = sum(
            job.config.samples_after(job.config.total_steps(num_rows), num_rows)
            * job.config.objective.completions_per_row
            for job in task.jobs
        )
        sizes = [round(num_ranks * shape.num_rows * mean) for shape in step_shapes(num_jobs, largest_batch)]
        most = num_ranks * max_tokens
        num_evaluated = num_ranks * min(NUM_EVALUATED[device.type], num_jobs * largest_batch)
        return cls(
            sizes=tuple(size for index, size in enumerate(sizes) if index < NUM_SIZES or size <= most),
            task_tokens=sequences * mean,
            eval_tokens=round(num_evaluated * mean),
            least_s=_LEAST_BUDGET_S[device.type],
            warms_up=device.type != "cpu",
        )

    def allows(self, num_tokens: int, *, token_s: float, spent_s: float) -> bool:
        """Return whether steps of ``num_tokens`` can still be measured after ``spent_s`` seconds, if a token takes
        ``token_s``."""
        budget_s = max(self.least_s, _BUDGET_FRACTION * self.task_tokens * token_s)
        return spent_s + _timed_s(num_tokens * token_s, self.warms_up) <= budget_s

    def remaining_s(self, num_measured: int, *, token_s: float, spent_s: float) -> float:
        """Return the expected seconds until the measurement ends."""
        left_s = 0.0
        for index, size in enumerate(self.sizes[num_measured:], start=num_measured):
            if index >= NUM_SIZES and not self.allows(size, token_s=token_s, spent_s=spent_s + left_s):
                break
            left_s += _timed_s(size * token_s, self.warms_up or not index)
        return left_s + _timed_s(self.eval_tokens * token_s / 3, self.warms_up)  # no backward pass


def usual_token_s(backbone: Backbone) -> float:
    """Return a guess of the seconds per token of a step, from the model's size and the device, before a step is
    measured."""
    num_parameters = sum(parameter.numel() for parameter in backbone.model.parameters())
    device = backbone.device.type
    num_cores = torch.get_num_threads() if device == "cpu" else 1
    return _FLOPS_PER_TOKEN * num_parameters / (_USUAL_FLOPS[device] * num_cores)


def _timed_s(step_s: float, warms_up: bool) -> float:
    """Return the seconds of a repeated step; with ``warms_up``, including the first step, which is not timed."""
    return warms_up * step_s + max(step_s, min(LEAST_TIMED_S, MOST_TIMES * step_s))
