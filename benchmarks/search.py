"""Compares searches that learn while they train with the grid, and with Optuna around PEFT, at equal wall-clock time.

``tpe`` and ``pbt`` are ALTO's searches, and ``grid`` is ALTO's grid with early exit. ``optuna`` is Optuna's TPE sampler
and Hyperband pruner, which control PEFT, one job at a time. All have the same rows, search space and seconds, including
loading. Adapters are chosen by the validation rows, and judged outside of the measured time on test rows that were not
used for the choice.

ALTO runs with its defaults. Its journal says which adapter led at which time. Afterwards each job that ever led is
trained again alone up to its last lead, and its adapters are judged at the steps at which they led, because a job alone
equals the job in the search. Only a population evaluates its leaders on the test rows while it runs, in its own time,
because a copy of another job cannot be trained alone.

    python -m benchmarks.paper search --scale cpu
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import torch
from peft import PeftModel

from alto import Engine, Task
from alto.backbone import resolve_model
from alto.data.source import carve_rows
from alto.early_exit import LossPoint, selection_of
from alto.errors import TaskInterruptedError
from alto.runs import JournalEntry, read_entries
from alto.runs.events import BestMeasured, JobAdded, JobEvaluated, TaskStarted
from benchmarks.baselines.bare_peft import evaluate
from benchmarks.baselines.job import Evaluation, JobSettings, prepare
from benchmarks.baselines.optuna_peft import optuna_search
from benchmarks.common import GSM8K, option_parser, publish_figures

GOALS = {"tpe_over_optuna_time_to_loss": (">=", 4.0)}
SPACE: Mapping[str, Any] = {
    "learning_rate": {"min": 1e-5, "max": 1e-1, "log": True, "num": 5},
    "r": [8, 16, 32, 64],
    "per_device_train_batch_size": [1, 2, 4, 8],
}
ALGORITHMS = ("tpe", "pbt", "grid")
REPORTED = (1, 3, 9, 27, 54, 81, 100)
"""Percent of a job's steps at which Optuna validates it and may prune it."""

Best = tuple[float, float, float]
"""Seconds since the beginning, validation loss, test loss."""

MOST_DRIFT = 0.02
"""Relative difference of the smoothed training losses of a job in the search and alone that the gate allows. Float32
rounding grows if training is chaotic: 0.4 % were measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The work of one scale.

    Attributes:
        rows: Training, validation and test rows of GSM8K.
        duration_s: Seconds of each search; infinite if samples and trials limit it, however slow the machine is.
        samples, trials: Limits of ALTO's searches and of Optuna's, if time is no limit.
    """

    rows: tuple[int, int, int]
    duration_s: float = math.inf
    samples: int = 120
    trials: int = 3
    seeds: tuple[int, ...]


SIZES = {
    "smoke": Size(rows=(12, 4, 4), samples=48, trials=2, seeds=(1,)),
    "cpu": Size(rows=(240, 40, 160), duration_s=150.0, seeds=(1, 2, 3)),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = option_parser(__doc__, SIZES, model="alto-tiny", dataset=GSM8K, threads=True).parse_args(arguments)
    size = SIZES[options.scale]
    torch.set_num_threads(options.threads)
    rows = []
    for seed in size.seeds:
        with tempfile.TemporaryDirectory() as folder:
            rows += searches(size, seed, options.model, options.dataset, Path(folder))
    failures = gate(rows, size)
    return publish_figures(
        options,
        "search",
        gate_failures=failures,
        figures=lambda: figures(rows, size),
        goals=GOALS,
        rows=rows,
    )


def searches(size: Size, seed: int, model: str, data: Path, folder: Path) -> list[dict[str, Any]]:
    """Run every system once, with Optuna between ALTO's searches, so that a slow minute affects each of them in some
    seed."""
    with data.open(encoding="utf-8") as lines:
        splits = carve_rows([json.loads(line) for line in lines], size.rows, seed)
    write_rows(folder, splits)
    order = [*ALGORITHMS, "optuna"]
    order = order[seed % len(order) :] + order[: seed % len(order)]
    found = []
    for system in order:
        drift = 0.0
        if system == "optuna":
            bests = with_optuna(size, seed, model, splits)
        else:
            bests, drift = with_alto(system, size, seed, model, folder)
        found.append({"seed": seed, "system": system, "bests": bests, "drift": drift})
        print(f"seed {seed}, {system}: test loss {bests[-1][2]:.4f} after {bests[-1][0]:.0f} s", flush=True)
    return found


def write_rows(folder: Path, splits: Sequence[Sequence[Mapping[str, str]]]) -> None:
    for name, rows in zip(("train", "validation", "test"), splits, strict=True):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def with_alto(algorithm: str, size: Size, seed: int, model: str, folder: Path) -> tuple[list[Best], float]:
    """Return the best adapters over time of one search, by the journal, and the drift of the jobs that were trained
    again."""
    limit = {"samples": size.samples} if math.isinf(size.duration_s) else {"duration_s": size.duration_s}
    shared = {
        "model": model,
        "dataset": str(folder / "train.jsonl"),
        "max_length": 512,
        "data_seed": seed,
        "report_to": "none",
    }
    task = Task(
        **shared,
        name=f"{algorithm}-{seed}",
        validation_dataset=str(folder / "validation.jsonl"),
        seed=seed,
        search_space=SPACE,
        search={"algorithm": algorithm, "budget": limit},
    )
    if algorithm == "pbt":
        # Every leader is tested as soon as it leads.
        task = task.replace(test_dataset=str(folder / "test.jsonl"), early_exit={"evaluation_share": "all"})
    began = time.time()
    result = Engine(output_dir=folder / "runs").tune(task)
    entries = read_entries(Path(result.run_dir) / "journal.jsonl")
    if algorithm == "pbt":
        return tested_in_run(entries, began, size), 0.0
    leaders = [(at - began, point) for at, point in leaders_of(entries) if at - began <= size.duration_s]
    configs, judged = configs_of(entries), {}
    for job in {point.job: None for _, point in leaders}:
        alone = Task(**shared, **configs[job], name=job, validation_dataset=str(folder / "test.jsonl"))
        points = [point for _, point in leaders if point.job == job]
        judged[job] = judge_alone(alone, points, size.rows[2], folder / "judged")
    pairs = [(at, point, judged[point.job][point.step]) for at, point in leaders]
    bests = [(at, point.validation_loss, alone.validation_loss) for at, point, alone in pairs]
    return bests, max((abs(alone.train_ema / point.train_ema - 1) for _, point, alone in pairs), default=0.0)


def tested_in_run(entries: Sequence[JournalEntry], began: float, size: Size) -> list[Best]:
    """Return the best adapters over time of a run that evaluated them on the test rows as soon as they led."""
    bests: list[Best] = []
    for entry in entries:
        event, at = entry.event, entry.time - began
        if not isinstance(event, JobEvaluated) or event.test_loss is None or at > size.duration_s:
            continue
        if not bests or event.validation_loss < bests[-1][1]:
            bests.append((at, event.validation_loss, event.test_loss))
    return bests


def leaders_of(entries: Sequence[JournalEntry]) -> list[tuple[float, LossPoint]]:
    """Return time and evaluation of every new leader, which the run would have returned from then on."""
    measured = [number for number, entry in enumerate(entries, start=1) if isinstance(entry.event, BestMeasured)]
    found: list[tuple[float, LossPoint]] = []
    for number, entry in enumerate(entries, start=1):
        # The best of the adapters that are measured at the end is known after the last of them.
        if not isinstance(entry.event, JobEvaluated) and number not in measured[-1:]:
            continue
        leader = selection_of(entries[:number]).winner()
        if leader is None or not math.isfinite(leader.validation_loss):
            continue
        if (leader.job, leader.step) not in [(point.job, point.step) for _, point in found[-1:]]:
            found.append((entry.time, leader))
    return found


def configs_of(entries: Sequence[JournalEntry]) -> dict[str, Mapping[str, Any]]:
    """Return the configuration of every job of a run."""
    configs: dict[str, Mapping[str, Any]] = {}
    for entry in entries:
        if isinstance(entry.event, TaskStarted):
            configs.update({job.job: job.config for job in entry.event.jobs})
        elif isinstance(entry.event, JobAdded):
            configs[entry.event.job] = entry.event.config
    return configs


def judge_alone(task: Task, points: Sequence[LossPoint], num_rows: int, folder: Path) -> dict[int, JobEvaluated]:
    """Return the evaluations of the one job of ``task`` after the steps of ``points``; it is trained no further.

    Args:
        task: Task with the test rows as its validation rows, which decide nothing about a single job.
        points: Evaluations of this job in a search.
        num_rows: Number of test rows.
        folder: Folder of the run.
    """
    evaluations: dict[int, JobEvaluated] = {}
    steps = sorted({point.step for point in points})

    def note(entry: JournalEntry) -> None:
        if isinstance(entry.event, JobEvaluated):
            evaluations[entry.event.step] = entry.event

    shares = [step / points[0].total_steps for step in steps if step < points[0].total_steps]
    early_exit = {
        "detect_divergence": False,
        "detect_overfitting": False,
        "evaluations": [[share, num_rows] for share in (*shares, 1.0)],
        "final_evaluations": [1, num_rows],
    }
    engine = Engine(
        output_dir=folder,
        observers=[note],
        is_interrupted=lambda: steps[-1] in evaluations,
        progress=False,
    )
    with contextlib.suppress(TaskInterruptedError):
        engine.tune(task.replace(early_exit=early_exit, num_samples=0))
    return evaluations


def with_optuna(size: Size, seed: int, model: str, splits: Sequence[Sequence[Mapping[str, str]]]) -> list[Best]:
    train, validation, test = splits
    prepared = prepare(resolve_model(model), train, validation, max_length=512)
    # Test rows are tokenised like validation rows.
    tested = prepare(resolve_model(model), train[:1], test, max_length=512).validation
    began = time.perf_counter() - prepared.duration_s
    unpaid_s = 0.0  # time for judging adapters on the test rows, which does not count
    bests: list[Best] = []

    def elapsed_s() -> float:
        return time.perf_counter() - began - unpaid_s

    def space(trial: optuna.Trial) -> Mapping[str, Any]:
        rates = SPACE["learning_rate"]
        r = trial.suggest_categorical("r", SPACE["r"])
        return {
            "learning_rate": trial.suggest_float("learning_rate", rates["min"], rates["max"], log=True),
            "r": r,
            "lora_alpha": 2 * r,
            "per_device_train_batch_size": trial.suggest_categorical(
                "per_device_train_batch_size", SPACE["per_device_train_batch_size"]
            ),
            "seed": seed,
            "lr_scheduler_type": "linear",
        }

    def judge(model: PeftModel, evaluation: Evaluation) -> bool:
        nonlocal unpaid_s
        if math.isfinite(evaluation.loss) and (not bests or evaluation.loss < bests[-1][1]):
            at, judged = elapsed_s(), time.perf_counter()
            loss = evaluate(model, tested, 8, prepared.tokenizer.pad_token_id)
            unpaid_s += time.perf_counter() - judged
            bests.append((at, evaluation.loss, loss))
        return elapsed_s() >= size.duration_s

    def reported(settings: JobSettings) -> Sequence[int]:
        total_steps = settings.total_steps(len(train))
        return sorted({max(1, math.ceil(percent * total_steps / 100)) for percent in REPORTED})

    limit = size.trials if math.isinf(size.duration_s) else math.inf
    optuna_search(
        prepared,
        space,
        sampler=optuna.samplers.TPESampler(seed=seed, multivariate=True),
        pruner="hyperband",
        eval_at_steps=reported,
        on_evaluation=judge,
        is_over=lambda trials: elapsed_s() >= size.duration_s or trials >= limit,
    )
    return bests


def time_to(bests: Sequence[Best], loss: float) -> float:
    """Return the seconds until the adapter that the validation rows choose has a test loss of ``loss``; infinite if
    never."""
    return next((at for at, _, tested in bests if tested <= loss), math.inf)


def figures(rows: Sequence[Mapping[str, Any]], size: Size) -> dict[str, float]:
    """Return medians over the seeds. The loss that both must reach is the worse of the final losses of the two
    systems."""
    by = {(row["seed"], row["system"]): row["bests"] for row in rows}
    found: dict[str, float] = {}
    for system in (*ALGORITHMS, "optuna"):
        found[f"test_loss_{system}"] = statistics.median(by[seed, system][-1][2] for seed in size.seeds)
    for system in ALGORITHMS:
        for other in ("optuna", "grid"):
            if system == other:
                continue
            ratios = []
            for seed in size.seeds:
                ours, theirs = by[seed, system], by[seed, other]
                loss = max(ours[-1][2], theirs[-1][2])
                ratios.append(time_to(theirs, loss) / time_to(ours, loss))
            found[f"{system}_over_{other}_time_to_loss"] = statistics.median(ratios)
            found[f"{system}_over_{other}_test_loss"] = statistics.median(
                by[seed, system][-1][2] / by[seed, other][-1][2] for seed in size.seeds
            )
    return found


def gate(rows: Sequence[Mapping[str, Any]], size: Size) -> list[str]:
    """Return the faults; empty if every system has found adapters in time, each later than the one before, and jobs
    that were trained again were as in their search.

    Validation losses must fall if all are on the same rows, which is not so in ``tpe`` and ``grid``.
    """
    failures = []
    for row in rows:
        times, losses = [at for at, _, _ in row["bests"]], [loss for _, loss, _ in row["bests"]]
        is_in_time = bool(times) and times == sorted(times) and times[-1] <= 1.1 * size.duration_s
        is_better = row["system"] in ("tpe", "grid") or losses == sorted(losses, reverse=True)
        system = f"seed {row['seed']}, {row['system']}"
        if not is_in_time or not is_better or not all(math.isfinite(tested) for _, _, tested in row["bests"]):
            failures.append(f"{system}: expected ever better adapters in time, found {row['bests']}")
        if not row["drift"] <= MOST_DRIFT:
            failures.append(f"{system}: expected jobs alone as in the search, found them {row['drift']:.2g} apart")
    return failures
