"""Predicted against measured: the peak of memory over many packings, and the duration of whole tasks.

    python benchmarks/memory.py --scale cpu

Random weights of real configurations, rows of random tokens as long as GSM8K's. For every model the jobs are planned
once, as ``alto plan`` does. Then every packing takes a few steps in a process of its own, whose peak is compared with
what the memory law said of the tokens that it really batched. Every task of ``durations`` is planned, then trained to
its end with early exit off. The gate: every measured peak is above the base model's own bytes, every task did all of
its steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import RESULTS_DIR, ROOT, Result, format_table, publish
from kernels_lib.lengths import row_lengths
from kernels_lib.shapes import SHAPES, random_model
from memory_lib.plans import PLANS, DurationCase, ModelPlan, Plan

GOALS = {
    "memory_error_median": ("<=", 0.05),
    "memory_error_worst": ("<=", 0.12),
    "memory_above_prediction": ("<=", 0.10),
    "duration_error_worst": ("<=", 0.15),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    plan = PLANS[options.scale]
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--scale gpu: expected an NVIDIA GPU, found none; choose --scale cpu")
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for model in plan.models:
        with tempfile.TemporaryDirectory() as folder:
            _save(model, plan, Path(folder))
            child = _Child(plan, model, Path(folder), options.threads)
            rows += _peaks(child, model, failures)
            rows += _durations(child, model)
    print(format_table(list(rows[0]), (list(row.values()) for row in rows if row["table"] == "peak")))
    result = Result.of(
        benchmark="memory",
        scale=options.scale,
        gate_failures=failures,
        figures=figures(rows),
        goals=GOALS,
        rows=rows,
        notes=[
            "memory_above_prediction is the most that a peak was above its prediction, as a share of the prediction; "
            "a tenth of the memory is planned with as margin.",
            "Peaks are of the whole process on a CPU, of the allocator's reserve on CUDA, base model included.",
            "Durations are of training, evaluation and checkpoints, in the packing that the plan chose; loading the "
            "model and reading the rows are not in them, nor in what is predicted.",
        ],
    )
    return publish(result, options.output)


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The figures that the rows come to."""
    memory = [row["predicted"] / row["measured"] - 1 for row in rows if row["table"] == "peak"]
    durations = [abs(row["predicted"] / row["measured"] - 1) for row in rows if row["table"] == "duration"]
    return {
        "memory_error_median": statistics.median(map(abs, memory)),
        "memory_error_worst": max(map(abs, memory)),
        "memory_above_prediction": max(0.0, *(1 / (1 + error) - 1 for error in memory)),
        "duration_error_median": statistics.median(durations),
        "duration_error_worst": max(durations),
    }


def _peaks(child: _Child, model: ModelPlan, failures: list[str]) -> list[dict[str, Any]]:
    most = max(case.num_jobs for case in model.peaks)
    largest = max(case.batch_size for case in model.peaks)
    ranks = [model.ranks[index % len(model.ranks)] for index in range(most)]
    planned = child.ask("plan", _jobs(ranks, [largest]))
    memory, weights = planned["memory"], SHAPES[model.shape]
    rows = []
    for case in model.peaks:
        limit = {"max_tokens_per_pass": case.max_tokens_per_pass}
        packing = {"num_jobs": case.num_jobs, "batch_size": case.batch_size}
        found = child.ask("peak", _jobs(ranks, [largest]) | limit, **packing)
        bank = planned["slot_bytes"] * case.num_jobs
        predicted = memory["fixed_bytes"] + memory["bytes_per_token"] * found["num_tokens"] + bank
        if found["peak_bytes"] <= weights["vocab_size"] * weights["hidden_size"]:
            failures.append(f"{model.shape}: a peak of {found['peak_bytes']} bytes, less than the base model's")
        rows.append(
            {
                "table": "peak",
                "case": f"{model.shape}: {case.num_jobs} jobs × {case.batch_size} rows",
                "tokens": found["num_tokens"],
                "predicted": predicted,
                "measured": found["peak_bytes"],
                "error": predicted / found["peak_bytes"] - 1,
            }
        )
        print(rows[-1], flush=True)
    return rows


def _durations(child: _Child, model: ModelPlan) -> list[dict[str, Any]]:
    rows = []
    for case in model.durations:
        task = _duration_task(case)
        planned = child.ask("plan", task, num_rows=case.num_rows)
        limits = {key: planned[key] for key in ("max_slots", "max_tokens_per_step", "max_tokens_per_pass")}
        found = child.ask("run", task | limits, num_rows=case.num_rows)
        rows.append(
            {
                "table": "duration",
                "case": case.name,
                "tokens": planned["max_tokens_per_step"],
                "predicted": planned["duration_s"],
                "measured": found["duration_s"],
                "error": planned["duration_s"] / found["duration_s"] - 1,
            }
        )
        print(rows[-1], flush=True)
    return rows


class _Child:
    """Asks processes of their own about tasks on one model."""

    def __init__(self, plan: Plan, model: ModelPlan, folder: Path, threads: int) -> None:
        self._plan, self._model, self._folder, self._threads = plan, model, folder, threads

    def ask(self, action: str, task: dict[str, Any], num_rows: int | None = None, **packing: int) -> dict[str, Any]:
        lengths = row_lengths(self._model.tokenizer)[:num_rows]
        request = {
            "action": action,
            "task": {"model": str(self._folder), "dataset": "random.jsonl", "dtype": self._plan.dtype, **task},
            "lengths": lengths,
            "device": self._plan.device,
            "threads": self._threads,
            **packing,
        }
        return in_child(request)


def in_child(request: dict[str, Any]) -> dict[str, Any]:
    """What ``memory_lib/child.py`` answers, in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "memory_lib" / "child.py")],
        input=json.dumps(request),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def _save(model: ModelPlan, plan: Plan, folder: Path) -> None:
    """A model with random weights and a tokenizer, as ``from_pretrained`` takes them."""
    from transformers import AutoTokenizer

    from alto.backbone import resolve_model

    AutoTokenizer.from_pretrained(resolve_model("alto-tiny")).save_pretrained(folder)
    dtype = getattr(torch, plan.dtype)
    random_model(SHAPES[model.shape], device=torch.device("cpu"), dtype=dtype).save_pretrained(folder)


def _jobs(ranks: Sequence[int], batch_sizes: Sequence[int]) -> dict[str, Any]:
    """A task with a job for every rank and batch size."""
    pairs = [(rank, size) for rank in ranks for size in batch_sizes]
    return {
        "learning_rate": 1e-4,
        "num_train_epochs": 1,
        "early_exit": False,
        "search_space": {
            "paired": {
                "r": [rank for rank, _ in pairs],
                "per_device_train_batch_size": [size for _, size in pairs],
                "seed": list(range(len(pairs))),
            }
        },
    }


def _duration_task(case: DurationCase) -> dict[str, Any]:
    return _jobs(case.ranks, case.batch_sizes) | {"num_train_epochs": case.num_epochs, "name": case.name}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=tuple(PLANS), default="smoke")
    parser.add_argument("--output", type=Path, default=RESULTS_DIR)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
