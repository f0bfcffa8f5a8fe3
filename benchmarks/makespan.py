"""Measures eleven tasks on one machine in four ways: the paper's ablation on real executors.

``B`` trains the configurations of a task together (batching alone): every job to its end, and tasks in the order in
which they came. ``B+S`` also schedules the tasks, ``B+EE`` also ends losing jobs early, and ``B+S+EE`` does both. All
start from the same measured profiles, run on the same slots, and are timed from the schedule to the last exported
adapter. If tasks are scheduled, those on one base may share an executor.

    python -m benchmarks.paper makespan --scale cpu
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from alto import EarlyExit, Engine, Task, TaskResult
from alto.data.source import sample_rows, split_rows
from alto.errors import DataError
from alto.runs import Attempt, QueueHistory, read_queue_history
from benchmarks.common import GSM8K, option_parser, publish_figures
from benchmarks.rows import read_rows, write_rows

GOALS = {"full_over_batched": (">=", 8.0), "best_loss_ratio": ("<=", 1.002)}
MODES = {
    "B": ("fifo", False),
    "B+S": ("cp-sat", False),
    "B+EE": ("fifo", True),
    "B+S+EE": ("cp-sat", True),
}
"""Method of scheduling by name, and whether early exit is on."""

_RATES = (1e-4, 5e-4, 2e-3, 3e-3, 5e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The work of one scale.

    Attributes:
        slots: Number of CPU slots; a task on n of them has n such shares of the cores.
        rows: Rows drawn from GSM8K before the 90/10 split.
        tasks: Slots, epochs, learning rates, ranks and batch sizes of each task.
    """

    slots: int
    rows: int
    tasks: tuple[tuple[int, int, tuple[float, ...], tuple[int, ...], tuple[int, ...]], ...]


_WIDE, _NARROW = ((16, 32), (1, 4)), ((16,), (2, 8))
PLANS = {
    "smoke": Plan(slots=2, rows=20, tasks=((1, 1, (2e-3,), (4,), (2, 4)), (2, 1, (2e-3,), (4,), (2, 4)))),
    "cpu": Plan(
        slots=2,
        rows=45,
        tasks=(
            (1, 3, _RATES, *_WIDE),
            (2, 2, _RATES, *_WIDE),
            (1, 1, _RATES, *_NARROW),
            (1, 4, _RATES[1:], *_WIDE),
            (2, 1, _RATES, *_WIDE),
            (1, 2, _RATES[:4], *_WIDE),
            (1, 6, _RATES, *_NARROW),
            (2, 3, _RATES[1:], *_WIDE),
            (1, 3, _RATES, *_NARROW),
            (1, 2, _RATES, *_WIDE),
            (1, 1, _RATES[1:], *_WIDE),
        ),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = option_parser(__doc__, PLANS, dataset=GSM8K).parse_args(arguments)
    plan = PLANS[options.scale]
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, ALTO_CACHE=str(Path(folder) / "cache")):
        tasks = make_tasks(plan, options.dataset, Path(folder))
        profile_s = sum(profile(_with_exits(tasks, exits), plan) for exits in (False, True))
        print(f"measured what the tasks take in {profile_s:.0f} s", flush=True)
        found = {name: run(name, tasks, plan, Path(folder) / name) for name in MODES}
    return publish_figures(
        options,
        "makespan",
        gate_failures=gate(found),
        figures=lambda: figures(found, profile_s),
        goals=GOALS,
        rows=[row(name, measured) for name, measured in found.items()],
        notes=[
            f"{len(plan.tasks)} tasks of {sum(len(task.jobs) for task in tasks)} jobs in all on {plan.slots} CPU "
            f"slots, alto-tiny, {plan.rows} rows of {options.dataset.parent.name}/{options.dataset.name}; tasks differ "
            "in slots, epochs, learning rates, ranks and batch sizes.",
            "Timed from the call of engine.schedule to the last adapter: solving, starting processes, loading, "
            "training, evaluating, saving and reporting are all in it.",
            f"Measuring what the tasks take was done once before, in {profile_s:.0f} s, and is kept on disk for "
            "every later run. It is in none of the four; what has with_profiling in its name adds all of it. "
            "B needs none.",
        ],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurement of one of the four ways.

    Attributes:
        seconds: Seconds from the schedule to the last adapter.
        planned_s: Makespan of the first plan.
    """

    seconds: float
    planned_s: float
    results: list[TaskResult]
    history: QueueHistory


def make_tasks(plan: Plan, data: Path, folder: Path) -> list[Task]:
    """Return the tasks, whose rows are in files in ``folder``."""
    seed = 42
    rows = read_rows(data)
    if len(rows) < plan.rows:
        raise DataError(f"{data}: expected at least {plan.rows} rows, found {len(rows)}; name a larger file")
    train, validation = split_rows(sample_rows(rows, plan.rows, seed), 0.1, seed)
    dataset = write_rows(folder / "train.jsonl", train)
    validation_dataset = write_rows(folder / "validation.jsonl", validation)
    return [
        Task(
            name=f"task-{number:02d}",
            model="alto-tiny",
            dataset=dataset,
            validation_dataset=validation_dataset,
            max_length=256,
            num_gpus=slots,
            num_train_epochs=epochs,
            eval_steps=0.1,
            report_to="none",
            search_space={"learning_rate": list(rates), "r": list(ranks), "per_device_train_batch_size": list(sizes)},
        )
        for number, (slots, epochs, rates, ranks, sizes) in enumerate(plan.tasks, start=1)
    ]


def run(name: str, tasks: Sequence[Task], plan: Plan, output_dir: Path) -> Measured:
    """Schedule and run ``tasks`` in one of the four ways."""
    method, exits = MODES[name]
    tasks = _with_exits(tasks, exits)
    began = time.perf_counter()
    engine = Engine(strategy="single", total_gpus=plan.slots, output_dir=output_dir)
    schedule = engine.schedule(tasks, method=method)
    results = engine.batched_execution(tasks, schedule)
    seconds = time.perf_counter() - began
    (root,) = output_dir.glob("queue-*")
    print(f"{name}: {seconds:.0f} s, planned {schedule.makespan_s:.0f} s ({schedule.status})", flush=True)
    return Measured(seconds=seconds, planned_s=schedule.makespan_s, results=results, history=read_queue_history(root))


def gate(found: dict[str, Measured]) -> list[str]:
    """Return what invalidates the timings: shared GPUs, tasks that ran twice, or adapters that depend on where tasks
    ran.

    The effect of early exit on the best adapters is a figure with a goal.
    """
    failures = []
    for name, measured in found.items():
        attempts = [attempt for task in measured.history.tasks.values() for attempt in task.attempts]
        if len(attempts) != len(measured.history.tasks):
            failures.append(f"{name}: {len(attempts)} executors for {len(measured.history.tasks)} tasks")
        failures += [f"{name}: two tasks at a time on {gpu}" for gpu in _shared_gpus(attempts)]
    for result, full in zip(found["B+S"].results, found["B"].results, strict=True):
        loss, other = result.best_validation_loss, full.best_validation_loss
        if abs(loss / other - 1) > 0.01:
            failures.append(f"{result.task}: best loss {loss:.4f} when scheduled, {other:.4f} in order")
    return failures


def profile(tasks: Sequence[Task], plan: Plan) -> float:
    """Measure memory and time of ``tasks``, so that later runs find them on disk; return the seconds."""
    began = time.perf_counter()
    Engine(strategy="single", total_gpus=plan.slots).schedule(tasks, method="lpt")
    return time.perf_counter() - began


def figures(found: dict[str, Measured], profile_s: float) -> dict[str, float]:
    """Return the figures of the four ways.

    Args:
        profile_s: Seconds in which memory and time of the tasks were measured. Tasks with early exit share most of this
            with those without, so all of it counts for each.
    """
    seconds = {name: measured.seconds for name, measured in found.items()}
    ratios = [
        mine.best_validation_loss / full.best_validation_loss
        for mine, full in zip(found["B+S+EE"].results, found["B"].results, strict=True)
    ]
    return {
        "full_over_batched": seconds["B"] / seconds["B+S+EE"],
        "scheduled_over_batched": seconds["B"] / seconds["B+S"],
        "early_exit_over_batched": seconds["B"] / seconds["B+EE"],
        "full_over_batched_with_profiling": seconds["B"] / (seconds["B+S+EE"] + profile_s),
        "scheduled_over_batched_with_profiling": seconds["B"] / (seconds["B+S"] + profile_s),
        "best_loss_ratio": sum(ratios) / len(ratios),
        "worst_loss_ratio": max(ratios),
    }


def row(name: str, measured: Measured) -> dict[str, Any]:
    trained = sum(result.samples_trained for result in measured.results)
    budgeted = sum(result.samples_budgeted for result in measured.results)
    return {
        "mode": name,
        "seconds": measured.seconds,
        "planned_s": measured.planned_s,
        "samples_trained": trained / budgeted,
        "plans": len(measured.history.plans),
    }


def _with_exits(tasks: Sequence[Task], exits: bool) -> list[Task]:
    return [task if exits else task.replace(early_exit=EarlyExit(enabled=False)) for task in tasks]


def _shared_gpus(attempts: Sequence[Attempt]) -> list[str]:
    """Return GPUs that two attempts had at a time without sharing an executor."""
    return [
        f"{gpu.node}:{gpu.index}"
        for one, other in itertools.combinations(attempts, 2)
        if not (one.executor and one.executor == other.executor)
        and max(one.start, other.start) < min(one.end or one.start, other.end or other.start)
        for gpu in set(one.gpus).intersection(other.gpus)
    ]
