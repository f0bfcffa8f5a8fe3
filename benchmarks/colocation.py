"""Measures six small tasks on one base model: one executor for all tasks is compared with one executor for each, and
with ALTO's plan, on the same cores, with rows of about 90 and of about 250 tokens. It also measures the time that a
kept process saves at the start of a task, and how fairly tasks with rows of different lengths are treated.

    python -m benchmarks.paper colocation --scale cpu
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from alto import Engine, Task, TaskResult
from alto.cluster import AttemptEnded, EntryWritten, Launch, Outcome, TaskTicket, open_cluster
from alto.data import read_task_rows
from alto.data.source import sample_rows
from alto.engine.estimates import base_key
from alto.engine.work import TRAIN
from alto.executor import Executor, Ranks, RunInputs, SharedBank, TaskContext, TaskSession, load_base
from alto.records import Gpu, Placement, Schedule
from alto.runs import Journal, RunDir, read_entries, read_queue_history
from alto.runs.events import JobAdmitted
from alto.scheduler import jain_index
from alto.spec import BaseModelSpec
from benchmarks.common import DATA_DIR, option_parser, publish_figures
from benchmarks.rows import read_rows, write_rows
from benchmarks.turns import by_turns

GOALS = {
    "planned_over_best": (">=", 0.9),
    "start_over_cold": ("<=", 0.2),
    "jain_index": (">=", 0.95),
}

NUM_TASKS = 6
DATA = {"cot_flan": "cot_flan/train.jsonl.gz", "gsm8k": "gsm8k/train.jsonl"}
"""File of the rows for each set of tasks: one task for each of its six kinds of questions, or six samples of one
kind."""

ROW_TOKENS = (50, 100, 200, 400, 700, 1000)

COLD = """
import sys
from alto.cluster import run_host
print(run_host(sys.argv[1], sys.argv[2], lambda: False).outcome)
"""
"""A process that has imported nothing, as every executor of version 0.1 was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The work of one scale.

    Attributes:
        data: Sets of tasks, keys of ``DATA``.
        rows: Rows of each task.
        epochs: Epochs of each task.
        repeats: Repetitions of both ways, in turn.
        turns: Turns of the executor over which tokens are counted.
    """

    data: tuple[str, ...]
    rows: int
    epochs: int
    repeats: int
    turns: int


SCALES = {
    "smoke": Scale(data=("cot_flan",), rows=8, epochs=1, repeats=1, turns=20),
    "cpu": Scale(data=("cot_flan", "gsm8k"), rows=60, epochs=2, repeats=3, turns=200),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = option_parser(__doc__, SCALES, dataset=DATA_DIR).parse_args(arguments)
    scale = SCALES[options.scale]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tasks_of = {name: make_tasks(scale, options.dataset / DATA[name], folder / name) for name in scale.data}
        starts = measure_starts(tasks_of["cot_flan"][0], folder / "starts", scale.repeats)
        runs_of = {name: both_ways(tasks, scale.repeats, folder / name / "runs") for name, tasks in tasks_of.items()}
        tokens = measure_fairness(folder / "fairness", scale.turns)
    failures = [f"{name}: {failure}" for name, runs in runs_of.items() for failure in gate(runs)]
    return publish_figures(
        options,
        "colocation",
        gate_failures=failures,
        figures=lambda: figures(runs_of, starts, tokens),
        goals=GOALS,
        rows=[
            *(
                {"tasks": name, "way": way, "seconds": found.seconds}
                for name, runs in runs_of.items()
                for way, several in runs.items()
                for found in several
            ),
            *({"start": kind, "seconds": seconds} for kind, several in starts.items() for seconds in several),
            *({"row_tokens": number, "tokens": trained} for number, trained in tokens.items()),
        ],
        notes=[
            f"{NUM_TASKS} tasks of two jobs on alto-tiny, {scale.rows} rows each, {scale.epochs} epochs, no early "
            "exit: the six kinds of questions in cot_flan, or six samples of GSM8K (figures that end in gsm8k). "
            "Separate: a CPU slot and an executor for each task. Colocated: one slot with all cores. Planned: by "
            "ALTO's schedule, on as many slots as it chooses; tasks are measured before. Timed from the call to the "
            "last exported adapter, processes and evaluations in it; by turns.",
            "Start: from the start of the task to the admission of its first job, directly before its first step. "
            "Cold: a new Python process, as version 0.1 had for every executor. Forked: by the zygote, which has "
            "everything imported. Kept: by a process that has the base model loaded.",
            f"Fairness: equal tasks with rows of {', '.join(map(str, ROW_TOKENS))} tokens; tokens trained in "
            f"{scale.turns} turns of one executor.",
        ],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one of the two ways.

    Attributes:
        seconds: Seconds from the call to the last adapter.
        most_processes: Number of different executors.
    """

    seconds: float
    results: list[TaskResult]
    most_processes: int


def both_ways(tasks: Sequence[Task], repeats: int, folder: Path) -> dict[str, list[Run]]:
    """Run both ways in turn, as often as ``repeats``."""
    number = itertools.count()
    ways = ("separate", "colocated", "planned")
    rounds = list(by_turns({way: lambda way=way: run(way, tasks, folder / str(next(number))) for way in ways}, repeats))
    return {way: [found[way][0] for found in rounds] for way in ways}


def make_tasks(scale: Scale, data: Path, folder: Path) -> list[Task]:
    """Return small tasks, each on its own rows; if the data has kinds, each on the rows of one kind."""
    folder.mkdir()
    rows = read_rows(data)
    kinds = sorted({row["task"] for row in rows if "task" in row})
    tasks = []
    for number in range(NUM_TASKS):
        own = sample_rows([row for row in rows if not kinds or row["task"] == kinds[number]], scale.rows, seed=number)
        shown = [{"prompt": row["prompt"], "response": row["response"]} if kinds else row for row in own]
        tasks.append(
            Task(
                name=f"task-{number}",
                model="alto-tiny",
                dataset=write_rows(folder / f"rows-{number}.jsonl", shown),
                num_train_epochs=scale.epochs,
                eval_steps=0.25,
                max_length=512,
                early_exit=False,
                report_to="none",
                max_slots=2,
                max_tokens_per_step=4096,
                max_tokens_per_pass=4096,
                gradient_checkpointing=False,
                search_space={"learning_rate": [5e-4, 2e-3], "per_device_train_batch_size": [1]},
            )
        )
    return tasks


def run(way: str, tasks: Sequence[Task], output_dir: Path) -> Run:
    """Run all tasks at once: in one executor, in one for each, or as ALTO plans it."""
    if way == "planned":
        engine = Engine(strategy="single", output_dir=output_dir)
        return timed(way, engine, tasks, engine.schedule(tasks))
    num_slots = 1 if way == "colocated" else len(tasks)
    schedule = Schedule(
        method="lpt",
        status="heuristic",
        bound_s=0.0,
        placements=tuple(
            Placement(
                task=task.name,
                gpus=(Gpu("local", number % num_slots),),
                start_s=0.0,
                duration_s=60.0,
                executor="all" if way == "colocated" else "",
            )
            for number, task in enumerate(tasks)
        ),
    )
    return timed(way, Engine(strategy="single", total_gpus=num_slots, output_dir=output_dir), tasks, schedule)


def timed(way: str, engine: Engine, tasks: Sequence[Task], schedule: Schedule) -> Run:
    """Run ``tasks`` by ``schedule``."""
    began = time.perf_counter()
    results = engine.batched_execution(tasks, schedule)
    seconds = time.perf_counter() - began
    (root,) = Path(engine.output_dir).glob("queue-*")
    attempts = [attempt for task in read_queue_history(root).tasks.values() for attempt in task.attempts]
    executors = {attempt.executor or f"{attempt.gpus} {attempt.start}" for attempt in attempts}
    print(f"{way}: {seconds:.1f} s in {len(executors)} executors", flush=True)
    return Run(seconds=seconds, results=results, most_processes=len(executors))


def gate(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """Return what invalidates the timings: unexpected executors, or other adapters."""
    failures = []
    for way, expected in (("separate", NUM_TASKS), ("colocated", 1)):
        failures += [
            f"{way}: {found.most_processes} executors" for found in runs[way] if found.most_processes != expected
        ]
    for way in ("colocated", "planned"):
        for one, other in zip(runs["separate"][0].results, runs[way][0].results, strict=True):
            if one.best_job != other.best_job or abs(one.best_validation_loss / other.best_validation_loss - 1) > 1e-3:
                failures.append(
                    f"{one.task}: {one.best_job} at {one.best_validation_loss:.5f} by itself, {other.best_job} at "
                    f"{other.best_validation_loss:.5f} {way}"
                )
    return failures


def measure_starts(task: Task, folder: Path, repeats: int) -> dict[str, list[float]]:
    """Return the seconds from the start of a task to the admission of its first job: in a cold, a forked and a kept
    process."""
    folder.mkdir()
    found: dict[str, list[float]] = {"cold": [], "forked": [], "kept": []}
    for repeat in range(repeats):
        root = folder / f"cold-{repeat}"
        RunDir(root).begin(task)
        began = time.time()
        subprocess.run([sys.executable, "-c", COLD, TRAIN, str(root)], check=True, stdout=subprocess.DEVNULL)
        found["cold"].append(_first_admission(root) - began)
    with contextlib.closing(open_cluster("local", total_gpus=1)) as cluster:
        for number in range(repeats + 1):
            root = folder / f"kept-{number}"
            RunDir(root).begin(task)
            ticket = TaskTicket(task="a", run_dir=str(root), host=TRAIN, base=base_key(task))
            launch = Launch(ticket=ticket, gpus=(Gpu("local", 0),), attempt=1)
            began = time.time()
            cluster.start(launch)
            admitted: list[float] = []
            while True:
                events = cluster.poll(1.0)
                admitted += [
                    event.entry.time
                    for event in events
                    if isinstance(event, EntryWritten) and isinstance(event.entry.event, JobAdmitted)
                ]
                ended = [event for event in events if isinstance(event, AttemptEnded)]
                if ended:
                    break
            assert ended[0].outcome is Outcome.FINISHED, ended[0].reason
            found["kept" if number else "forked"].append(admitted[0] - began)
    return found


def _first_admission(root: Path) -> float:
    entries = read_entries(root / "journal.jsonl")
    return next(entry.time for entry in entries if isinstance(entry.event, JobAdmitted))


def measure_fairness(folder: Path, turns: int) -> dict[int, int]:
    """Return the tokens that equal tasks with rows of these lengths train in a number of turns of one executor."""
    folder.mkdir()
    backbone = load_base(BaseModelSpec(id="alto-tiny"), torch.device("cpu"), Ranks())
    bank = SharedBank(backbone, Ranks(), "float32")
    executor = Executor(bank)
    with contextlib.ExitStack() as stack:
        for number in ROW_TOKENS:
            task = _task_of_rows(number, turns, folder, backbone.tokenizer)
            run_dir = RunDir.create(folder / str(number), task)
            journal = stack.enter_context(Journal(run_dir.journal_file))
            data = read_task_rows(task).encode(backbone.tokenizer)
            context = TaskContext.of(task, backbone, data)
            executor.attach(str(number), TaskSession(context, journal, RunInputs(run_dir=run_dir), bank=bank))
        sessions = dict(executor.sessions)
        for _ in range(turns):
            ended = executor.turn()
            assert not ended, ended
        return {int(name): found.received.tokens for name, found in sessions.items() if found.received is not None}


def _task_of_rows(row_tokens: int, turns: int, folder: Path, tokenizer: Any) -> Task:
    """Return a task of two jobs on rows of about ``row_tokens`` tokens, with more steps than there are turns."""
    num_tokens = len(tokenizer(" ".join(map(str, range(1000, 1100))))["input_ids"]) / 100  # of a number of four digits
    count = int((row_tokens - 20) / num_tokens)
    rows = [
        {"prompt": f"Count from {n}.", "completion": " ".join(map(str, range(n, n + count)))} for n in range(1000, 1020)
    ]
    dataset = write_rows(folder / f"rows-{row_tokens}.jsonl", rows)
    return Task(
        name=f"rows-{row_tokens}",
        model="alto-tiny",
        dataset=dataset,
        validation_dataset=dataset,
        max_samples=20,
        max_length=row_tokens + 200,
        num_train_epochs=turns // 20 + 1,
        eval_steps=1.0,
        early_exit=False,
        report_to="none",
        max_slots=2,
        search_space={"learning_rate": [1e-4, 2e-4], "per_device_train_batch_size": [1]},
    )


def figures(
    runs_of: Mapping[str, Mapping[str, Sequence[Run]]],
    starts: Mapping[str, Sequence[float]],
    tokens: Mapping[int, int],
) -> dict[str, float]:
    """Return the figures: medians."""
    seconds = {
        name: {way: statistics.median(found.seconds for found in several) for way, several in runs.items()}
        for name, runs in runs_of.items()
    }
    ratio = {name: found["separate"] / found["colocated"] for name, found in seconds.items()}
    best = {name: min(found["separate"], found["colocated"]) / found["planned"] for name, found in seconds.items()}
    start = {kind: statistics.median(several) for kind, several in starts.items()}
    return {
        "planned_over_best": min(best.values()),
        "colocated_over_separate": ratio["cot_flan"],
        **({"colocated_over_separate_gsm8k": ratio["gsm8k"]} if "gsm8k" in ratio else {}),
        "start_over_cold": start["kept"] / start["cold"],
        "forked_start_over_cold": start["forked"] / start["cold"],
        "jain_index": jain_index({str(number): float(trained) for number, trained in tokens.items()}),
    }
