"""Searches that learn while they train, against the grid and against Optuna around PEFT, at equal wall-clock time.

``tpe`` and ``pbt`` are ALTO's, ``grid`` ALTO's grid with early exit; ``optuna`` is Optuna's TPE sampler and Hyperband
pruner driving PEFT one job at a time. All have the same rows, search space and seconds, loading included. Adapters are
chosen by the validation rows and judged on test rows that chose nothing.

    python -m benchmarks.paper search --scale cpu
"""

from __future__ import annotations

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
from alto.data.split import carve_rows
from alto.runs import read_events
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What one scale runs.

    Attributes:
        rows: Training, validation and test rows of GSM8K.
        duration_s: Of each search; infinite where samples and trials limit it, however slow the machine is.
        samples, trials: Limits of ALTO's searches and of Optuna's, where time is none.
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
    """Every system once; Optuna between ALTO's, so that a slow minute hits each of them in some seed."""
    with data.open(encoding="utf-8") as lines:
        splits = carve_rows([json.loads(line) for line in lines], size.rows, seed)
    for name, rows in zip(("train", "validation", "test"), splits, strict=True):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    order = [*ALGORITHMS, "optuna"]
    order = order[seed % len(order) :] + order[: seed % len(order)]
    found = []
    for system in order:
        if system == "optuna":
            bests = with_optuna(size, seed, model, splits)
        else:
            bests = with_alto(system, size, seed, model, folder)
        found.append({"seed": seed, "system": system, "bests": bests})
        print(f"seed {seed}, {system}: test loss {bests[-1][2]:.4f} after {bests[-1][0]:.0f} s", flush=True)
    return found


def with_alto(algorithm: str, size: Size, seed: int, model: str, folder: Path) -> list[Best]:
    """The best adapters so far of one search, by the journal."""
    limit = {"samples": size.samples} if math.isinf(size.duration_s) else {"duration_s": size.duration_s}
    task = Task(
        name=f"{algorithm}-{seed}",
        model=model,
        dataset=str(folder / "train.jsonl"),
        validation_dataset=str(folder / "validation.jsonl"),
        test_dataset=str(folder / "test.jsonl"),
        max_length=512,
        data_seed=seed,
        seed=seed,
        search_space=SPACE,
        search={"algorithm": algorithm, "budget": limit},
        early_exit={"evaluation_share": "all"},  # so that every leader is tested as soon as it leads
        report_to="none",
    )
    began = time.time()
    result = Engine(output_dir=folder / "runs").tune(task)
    bests: list[Best] = []
    for event in read_events(Path(result.run_dir) / "journal.jsonl"):
        if event["event"] == "eval" and event.get("test_loss") is not None:
            at, loss = event["time"] - began, event["validation_loss"]
            if at <= size.duration_s and (not bests or loss < bests[-1][1]):
                bests.append((at, loss, event["test_loss"]))
    return bests


def with_optuna(size: Size, seed: int, model: str, splits: Sequence[Sequence[Mapping[str, str]]]) -> list[Best]:
    train, validation, test = splits
    prepared = prepare(resolve_model(model), train, validation, max_length=512)
    # Rows to test on are tokenised as validation rows are.
    tested = prepare(resolve_model(model), train[:1], test, max_length=512).validation
    began = time.perf_counter() - prepared.duration_s
    unpaid_s = 0.0  # of judging adapters on the test rows
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
    """Seconds until the adapter that the validation rows choose has a test loss of ``loss``; infinite if never."""
    return next((at for at, _, tested in bests if tested <= loss), math.inf)


def figures(rows: Sequence[Mapping[str, Any]], size: Size) -> dict[str, float]:
    """Medians over the seeds. The loss that both must reach is the worse of the two that the systems end with."""
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
    """What is wrong; empty where every system has found an adapter in time, and validation losses only fall."""
    failures = []
    for row in rows:
        losses = [loss for _, loss, _ in row["bests"]]
        if not losses or losses != sorted(losses, reverse=True) or row["bests"][-1][0] > 1.1 * size.duration_s:
            system = f"seed {row['seed']}, {row['system']}"
            failures.append(f"{system}: expected ever better adapters in time, found {losses}")
    return failures
