"""Measures the peak memory and the duration of training steps of increasing size.

With several ranks, all take the same steps with equal numbers of jobs and tokens. A peak is the largest peak of any
rank; a duration is the duration of the step on all ranks.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch

from alto.backbone import Backbone
from alto.data import DataOrder, JobRows, TaskData
from alto.early_exit import policy_from
from alto.errors import DeviceMemoryError
from alto.executor.context import JobState, TaskContext
from alto.executor.micro_batches import MemoryEvent, MicroBatches, RowTooLargeError
from alto.executor.planned_job import PlannedJob, plan_jobs
from alto.executor.profiling.budget import LEAST_TIMED_S, MAX_JOBS, MOST_TIMES, MeasuringBudget, StepShape, step_shapes
from alto.executor.profiling.meter import CoreTime, capacity_bytes, peak_bytes, reset_peak, spread_of
from alto.executor.profiling.sketch import NUM_EVALUATED, RowLength, synthetic_rows
from alto.executor.profiling.threads import fastest, thread_counts, using_threads
from alto.executor.ranks import Ranks
from alto.executor.shared_bank import BankSize, build_trainer
from alto.executor.trainer import Trainer
from alto.lora import eject
from alto.objectives import find_objective
from alto.records import UNSTEADY, MemoryPoint, ThreadTime, ThroughputPoint
from alto.scheduler import fit_memory
from alto.spec import LOAD_IN_4BIT, Task, find_method

MARGIN = 0.9
"""Share of the device's memory that a plan may use. The rest is for allocations that are not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements on a device.

    Attributes:
        memory: Peaks without the bank.
        durations: Durations of steps, without the first step of each size, with the fastest number of CPU threads.
        threads: Durations of the last of these steps by number of CPU threads, all threads first; empty if only one
            number was tried.
        sample_token_s: Seconds to sample completions per token of prompts and completions; 0 if jobs do not generate.
    """

    memory: tuple[MemoryPoint, ...]
    durations: tuple[ThroughputPoint, ...]
    eval_token_s: float
    capacity_bytes: int
    duration_s: float
    threads: tuple[ThreadTime, ...] = ()
    sample_token_s: float = 0.0

    @property
    def num_threads(self) -> int | None:
        """The fastest number of CPU threads; None if only one number was tried."""
        return fastest(self.threads).num_threads if self.threads else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for :meth:`from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the measurements from the values of :meth:`to_dict`.

        Raises:
            KeyError, TypeError: ``values`` do not come from :meth:`to_dict`.
        """
        return cls(
            memory=tuple(MemoryPoint(**point) for point in values["memory"]),
            durations=tuple(ThroughputPoint(**point) for point in values["durations"]),
            eval_token_s=values["eval_token_s"],
            capacity_bytes=values["capacity_bytes"],
            duration_s=values["duration_s"],
            threads=tuple(ThreadTime(**time) for time in values.get("threads", ())),
            sample_token_s=values.get("sample_token_s", 0.0),
        )


def one_slot(task: Task, jobs: Sequence[PlannedJob], backbone: Backbone) -> BankSize:
    """Return the size of a bank with one slot in which each of the ``jobs`` of ``task`` fits."""
    dtypes: dict[str, Any] = {"adapter_dtype": task.adapter_dtype, "optim_state_dtype": task.optim_state_dtype}
    return BankSize.of(jobs, backbone, num_slots=1, **dtypes)


def measure(
    task: Task,
    backbone: Backbone,
    lengths: Sequence[RowLength],
    *,
    num_rows: int,
    max_tokens: int,
    ranks: Ranks | None = None,
    clock: Callable[[], float] = time.perf_counter,
    on_progress: Callable[[float], None] = lambda remaining_s: None,
) -> Measured:
    """Take steps of jobs of ``task`` on rows of random tokens, from small to large, while they fit.

    Steps of two sizes are always taken, because the memory model and the throughput model need them. After these, the
    measurement ends before a step that would not fit, has more than ``max_tokens``, or would exceed the time budget
    (:class:`MeasuringBudget`). The model is not changed.

    Args:
        num_rows: Number of rows of the training split.
        max_tokens: Largest number of tokens of a step.
        clock: Returns seconds; never goes back.
        on_progress: Called after each size with the expected seconds until the measurement ends.

    Raises:
        DeviceMemoryError: Not even one row of one job fits, or nothing larger does.
    """
    ranks = ranks or Ranks()
    began = clock()
    jobs = plan_jobs(task, backbone.model, num_rows)
    capacity = -int(ranks.max(-capacity_bytes(backbone.device, ranks.size)))  # the smallest
    largest_batch = max(job.config.sequences_per_step for job in task.jobs)
    size = one_slot(task, jobs, backbone)
    fitting = (MARGIN * capacity - backbone.num_bytes) / 2 / size.bytes_per_slot
    num_jobs = _measured_jobs(task, len(jobs), fitting, ranks)
    bank = num_jobs * size.bytes_per_slot
    todo = step_shapes(num_jobs, largest_batch)
    vocabulary = backbone.model.get_input_embeddings().num_embeddings
    entry = find_method(task.method).entry
    num_synthetic = max(shape.num_rows for shape in todo)
    rows = synthetic_rows(
        lengths,
        vocabulary,
        num_synthetic,
        num_evaluated=NUM_EVALUATED[backbone.device.type],
        is_labelled=entry.is_labelled,
        is_sampled=entry.generates,
        labels=task.label_set,
    )
    refused: list[MemoryEvent] = []
    context = _context(task, backbone, rows, jobs, ranks)
    trainer = _trainer(context, replace(size, num_slots=num_jobs), refused)
    planned = [jobs[index * len(jobs) // num_jobs] for index in range(num_jobs)]
    chosen = [JobState(planned=job, context=context) for job in planned]
    for slot, job in enumerate(chosen):
        trainer.admit(job, slot)
    memory: list[MemoryPoint] = []
    durations: list[ThroughputPoint] = []
    budget = MeasuringBudget.of(
        task,
        lengths,
        num_rows=num_rows,
        max_tokens=max_tokens,
        num_ranks=ranks.size,
        num_jobs=num_jobs,
        device=backbone.device,
    )
    token_s = eval_token_s = sample_token_s = 0.0
    try:
        for shape in todo:
            admitted = _admitted(chosen, shape, len(rows.train), ranks)
            of_all = sum(rows.train.num_row_tokens[row] for job in admitted for row in job.order.rows_of_step(0))
            parts = [JobRows(rows.train, slot, tuple(job.order.rows_of_step(0))) for slot, job in enumerate(admitted)]
            num_tokens = trainer.passes.micro_batches.num_tokens(parts) // ranks.size
            if _has_two_sizes(memory) and ranks.any(
                num_tokens > max_tokens
                or not budget.allows(of_all, token_s=token_s, spent_s=clock() - began)
                or not _will_fit(memory, num_tokens, MARGIN * capacity - bank)
            ):
                break
            reset_peak(backbone.device)
            is_warm = bool(memory) and backbone.device.type == "cpu"
            seconds, spread = map(ranks.max, _step_s(trainer, admitted, ranks, clock, is_warm=is_warm))
            if refused:
                break
            peak = int(ranks.max(peak_bytes(backbone.device) - bank))
            memory.append(MemoryPoint(num_jobs=shape.num_jobs, num_tokens=num_tokens, peak_bytes=peak))
            durations.append(
                ThroughputPoint(num_jobs=len(admitted), num_tokens=of_all, duration_s=seconds, spread=spread)
            )
            token_s = seconds / of_all
            on_progress(budget.remaining_s(len(memory), token_s=token_s, spent_s=clock() - began))
        if not memory:
            raise DeviceMemoryError(_nothing_fits(refused[0].num_tokens, backbone))
        if not _has_two_sizes(memory):
            raise DeviceMemoryError(_nothing_more_fits(memory[-1].num_tokens, num_tokens, backbone))
        threads: tuple[ThreadTime, ...] = ()
        if backbone.device.type == "cpu" and ranks.is_alone:
            last = _admitted(chosen, todo[len(memory) - 1], len(rows.train), ranks)
            threads = tuple(_thread_times(trainer, last, ranks, clock, budget=budget, known=durations[-1], began=began))
            faster = fastest(threads).duration_s / threads[0].duration_s
            durations = [replace(point, duration_s=point.duration_s * faster) for point in durations]
        evaluated = _admitted(chosen, StepShape(num_jobs=1, batch_size=1), 1, ranks)
        is_warm = backbone.device.type == "cpu"
        with using_threads(fastest(threads).num_threads if threads else None):
            if entry.generates:
                sample_token_s = _sample_token_s(trainer, chosen, len(rows.train), ranks, clock, is_warm=is_warm)
            else:
                seconds, _ = _timed(lambda: trainer.evaluate(evaluated), ranks, clock, is_warm=is_warm)
                eval_token_s = ranks.max(seconds) / (len(evaluated) * rows.validation.num_tokens)
    except RowTooLargeError as error:
        raise DeviceMemoryError(_nothing_fits(int(error.evidence["row_tokens"]), backbone)) from None
    finally:
        eject(backbone.model)
    return Measured(
        memory=tuple(memory),
        durations=tuple(durations),
        eval_token_s=eval_token_s,
        sample_token_s=sample_token_s,
        capacity_bytes=capacity,
        duration_s=clock() - began,
        threads=threads,
    )


def _thread_times(
    trainer: Trainer,
    jobs: Sequence[JobState],
    ranks: Ranks,
    clock: Callable[[], float],
    *,
    budget: MeasuringBudget,
    known: ThroughputPoint,
    began: float,
) -> Iterator[ThreadTime]:
    """Yield the duration of a step of ``jobs`` with all CPU threads, and with half, a quarter, … of them, within the
    budget of time. While other programs use the machine, only all threads are tried.

    Args:
        known: The step with all threads.
        began: When the measurement began.
    """
    all_threads, *fewer = thread_counts(torch.get_num_threads())
    last_s = known.duration_s
    yield ThreadTime(num_threads=all_threads, duration_s=last_s)
    if known.spread >= UNSTEADY:
        return
    for num_threads in fewer:
        if not budget.allows(known.num_tokens, token_s=2 * last_s / known.num_tokens, spent_s=clock() - began):
            return
        with using_threads(num_threads):
            last_s, _ = _step_s(trainer, jobs, ranks, clock, is_warm=True)
        yield ThreadTime(num_threads=num_threads, duration_s=last_s)


def _measured_jobs(task: Task, num_jobs: int, fitting: float, ranks: Ranks) -> int:
    """Return the number of jobs to measure together on a rank.

    Args:
        fitting: Number of jobs whose slots take half of the rank's memory.
    """
    of_rank = math.ceil(min(num_jobs, task.max_slots or num_jobs) / ranks.size)
    return -int(ranks.max(-max(1, min(MAX_JOBS, of_rank, int(fitting)))))


def _context(task: Task, backbone: Backbone, rows: TaskData, jobs: tuple[PlannedJob, ...], ranks: Ranks) -> TaskContext:
    """Return the context of the task on random rows with the lengths of its own rows; its jobs are planned for these
    rows."""
    return TaskContext(
        task=task,
        base=task.base_model,
        backbone=backbone,
        data=rows,
        jobs=jobs,
        objective=find_objective(task.method),
        policy=policy_from(task.early_exit),
        ranks=ranks,
    )


def _trainer(context: TaskContext, size: BankSize, refused: list[MemoryEvent]) -> Trainer:
    """Return a trainer as the task would use it, with micro-batches of any size."""
    micro_batches = MicroBatches(
        2**62, refused.append, can_retry=context.ranks.is_alone, is_padded=context.backbone.is_padded
    )
    trainer = build_trainer(context.backbone, size, micro_batches, context.ranks)
    # An operating system may allocate pages of zeros only when they are written.
    for tensor in (
        trainer.bank.params_ZP,
        trainer.bank.grads_ZP,
        trainer.optimizer.exp_avg_ZP,
        trainer.optimizer.exp_avg_sq_ZP,
        trainer.bank.working_ZP,
    ):
        if tensor is not None:
            tensor.fill_(1.0).zero_()
    return trainer


def _admitted(chosen: Sequence[JobState], shape: StepShape, num_rows: int, ranks: Ranks) -> list[JobState]:
    """Return the first of ``chosen`` on every rank, with batches of the size in ``shape``."""
    return [
        replace(
            job,
            slot=rank * len(chosen) + local_slot,
            planned=replace(job.planned, order=DataOrder(num_rows, shape.batch_size, local_slot)),
        )
        for rank in range(ranks.size)
        for local_slot, job in enumerate(chosen[: shape.num_jobs])
    ]


def _step_s(
    trainer: Trainer, jobs: Sequence[JobState], ranks: Ranks, clock: Callable[[], float], *, is_warm: bool
) -> tuple[float, float]:
    """Return the duration of a step of ``jobs`` and its spread, as in :func:`_timed`."""

    def step() -> None:
        trainer.step(jobs)
        for job in jobs:
            job.step += 1

    return _timed(step, ranks, clock, is_warm=is_warm)


_SAMPLED_TEXTS, _SAMPLED_TOKENS = 64, 16
"""Completions that are sampled to measure the time, of all jobs together, and tokens of each at most."""


def _sample_token_s(
    trainer: Trainer,
    chosen: Sequence[JobState],
    num_rows: int,
    ranks: Ranks,
    clock: Callable[[], float],
    *,
    is_warm: bool,
) -> float:
    """Return the seconds of sampling per token of prompts and completions, with many completions at a time as in a
    step."""
    batch_size = max(1, min(_SAMPLED_TEXTS // len(chosen), chosen[0].config.sequences_per_step))
    jobs = [
        replace(job, slot=slot, planned=replace(job.planned, order=DataOrder(num_rows, batch_size, slot)))
        for slot, job in enumerate(chosen)
    ]
    tokens: list[int] = []
    seconds, _ = _timed(
        lambda: tokens.append(trainer.sample_rows(jobs, _SAMPLED_TOKENS)), ranks, clock, is_warm=is_warm
    )
    return seconds / tokens[-1]


def _timed(
    action: Callable[[], object], ranks: Ranks, clock: Callable[[], float], *, is_warm: bool
) -> tuple[float, float]:
    """Return the median duration of ``action`` in seconds, and its spread as in `ThroughputPoint`.

    The first call is slower and is left out, unless ``is_warm``: similar calls came before, and nothing is compiled for
    this one.
    """
    if not is_warm:
        action()
    seconds: list[float] = []
    before = CoreTime.now()
    while not seconds or ranks.any(sum(seconds) < LEAST_TIMED_S and len(seconds) < MOST_TIMES):
        start = clock()
        action()
        seconds.append(clock() - start)
    return statistics.median(seconds), max(spread_of(seconds), before.waited_since())


def _has_two_sizes(memory: Sequence[MemoryPoint]) -> bool:
    """Return whether a line can be fitted to the peaks."""
    return len({point.num_tokens for point in memory}) >= 2


def _will_fit(memory: Sequence[MemoryPoint], num_tokens: int, room: float) -> bool:
    """Return whether a step of ``num_tokens`` is expected to fit into ``room`` bytes."""
    fit = fit_memory(memory)
    return fit.fixed_bytes + fit.bytes_per_token * num_tokens <= room


def _nothing_fits(num_tokens: int, backbone: Backbone) -> str:
    return (
        f"not enough memory on {backbone.device} for the base model and a training step of one job on a row of "
        f"{num_tokens} tokens; lower max_length or r, set gradient_checkpointing: true, load the "
        f"base model in 4 bits with {LOAD_IN_4BIT}, or shard it over more GPUs with num_gpus"
    )


def _nothing_more_fits(fitting: int, num_tokens: int, backbone: Backbone) -> str:
    return (
        f"memory profile: needs steps of two sizes, but {fitting} tokens fit on {backbone.device} and {num_tokens} do "
        f"not; lower max_length or r, set gradient_checkpointing: true, or {LOAD_IN_4BIT}"
    )
