"""Compares predictions with measurements: the peak of memory over many packings, and the duration of whole tasks.

    python -m benchmarks.paper memory --scale cpu
    python -m benchmarks.paper memory --scale gpu --stages peaks --out results   # a piece of it

The models have real configurations and random weights, and rows of random tokens with the lengths of GSM8K's. For every
model the jobs are planned once, as ``alto plan`` does. Then every packing takes a few steps in a process of its own,
whose peak is compared with the memory model's prediction for the tokens that were really batched. Every task of
``durations`` is planned, and then trained to its end with early exit off. The gate: every measured peak is above the
base model's own bytes, and every task did all of its steps.

If a case fails, this is recorded and the others continue, but its table then has no figures, and the exit code is 1.
The pieces of several commands make one result, see ``pieces.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT
from benchmarks.kernels.lengths import row_lengths
from benchmarks.kernels.shapes import SHAPES, random_model
from benchmarks.memory.plans import PLANS, DurationCase, ModelPlan, PeakCase, Plan
from benchmarks.pieces import (
    Action,
    Flush,
    GateFailedError,
    Piece,
    Study,
    describe_error,
    piece_name,
    piece_options,
    run_chosen,
)

STAGES = ("peaks", "durations")

GOALS = {
    "memory_error_median": ("<=", 0.05),
    "memory_error_worst": ("<=", 0.12),
    "memory_above_prediction": ("<=", 0.10),
    "duration_error_worst": ("<=", 0.15),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    actions = {
        piece_name(model.shape, stage): _action(PLANS[options.scale], model, stage, options.threads)
        for stage in STAGES
        for model in PLANS[options.scale].models
    }
    return run_chosen(study(options.scale), actions, options)


def study(scale: str) -> Study:
    """Return the study of ``scale``: all pieces, and their notes."""
    return Study(
        benchmark="memory",
        scale=scale,
        pieces=tuple(piece_name(model.shape, stage) for stage in STAGES for model in PLANS[scale].models),
        goals=GOALS,
        notes=(
            "memory_above_prediction is the most that a peak was above its prediction, as a share of the prediction; "
            "a tenth of the memory is planned with as margin.",
            "Peaks are of the whole process on a CPU, of the allocator's reserve on CUDA, base model included.",
            "Durations are of training, evaluation and checkpoints, in the packing that the plan chose; loading the "
            "model and reading the rows are not in them, nor in what is predicted.",
        ),
        figures=partial(_figures_of_pieces, scale),
    )


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the figures of the rows; a table without rows has none."""
    memory = [row["predicted"] / row["measured"] - 1 for row in rows if row["table"] == "peak"]
    durations = [abs(row["predicted"] / row["measured"] - 1) for row in rows if row["table"] == "duration"]
    found = {}
    if memory:
        found |= {
            "memory_error_median": statistics.median(map(abs, memory)),
            "memory_error_worst": max(map(abs, memory)),
            "memory_above_prediction": max(0.0, *(1 / (1 + error) - 1 for error in memory)),
        }
    if durations:
        found |= {"duration_error_median": statistics.median(durations), "duration_error_worst": max(durations)}
    return found


def _figures_of_pieces(scale: str, pieces: Mapping[str, Piece]) -> dict[str, float]:
    """Return the figures of every stage that is measured completely, on all models, because the worst of some cases is
    not the worst of all."""
    rows: list[dict[str, Any]] = []
    for stage in STAGES:
        found = [pieces.get(piece_name(model.shape, stage)) for model in PLANS[scale].models]
        if all(piece is not None and piece.is_sound for piece in found):
            rows += [row for piece in found if piece is not None for row in piece.rows]
    return figures(rows)


def _action(plan: Plan, model: ModelPlan, stage: str, threads: int) -> Action:
    measure = {"peaks": _peaks, "durations": _durations}[stage]

    def action(piece: Piece, flush: Flush) -> None:
        with tempfile.TemporaryDirectory() as folder:
            _save(model, plan, Path(folder))
            measure(_Child(plan, model, Path(folder), threads), model, piece, flush)

    return action


def _peaks(child: _Child, model: ModelPlan, piece: Piece, flush: Flush) -> None:
    most = max(case.num_jobs for case in model.peaks)
    largest = max(case.batch_size for case in model.peaks)
    jobs = _jobs([model.ranks[index % len(model.ranks)] for index in range(most)], [largest])
    planned = child.ask("plan", jobs)
    for case in model.peaks:
        name = f"{model.shape}: {case.num_jobs} jobs × {case.batch_size} rows"
        _record(piece, flush, "peak", name, partial(_peak, child, model, case, planned, jobs))


def _record(piece: Piece, flush: Flush, table: str, name: str, measure: Callable[[], dict[str, Any]]) -> None:
    """Return the row of ``measure``; or its failure, or its fault."""
    try:
        row = measure()
    except GateFailedError as error:
        piece.failures.extend(f"{name}: {failure}" for failure in error.failures)
    except Exception as error:
        piece.errors.append(f"{name}: {describe_error(error)}")
    else:
        piece.rows.append({"table": table, "case": name, **row})
        print(piece.rows[-1], flush=True)
        flush()


def _least_bytes(model: ModelPlan) -> int:
    """Return a number of bytes below the base model's own, whatever its precision."""
    return int(SHAPES[model.shape]["vocab_size"] * SHAPES[model.shape]["hidden_size"])


def _peak(
    child: _Child, model: ModelPlan, case: PeakCase, planned: Mapping[str, Any], jobs: Mapping[str, Any]
) -> dict[str, Any]:
    limit = {"max_tokens_per_pass": case.max_tokens_per_pass}
    found = child.ask("peak", {**jobs, **limit}, num_jobs=case.num_jobs, batch_size=case.batch_size)
    if found["peak_bytes"] <= _least_bytes(model):
        raise GateFailedError([f"a peak of {found['peak_bytes']} bytes, less than the base model's"])
    memory, bank = planned["memory"], planned["slot_bytes"] * case.num_jobs
    predicted = memory["fixed_bytes"] + memory["bytes_per_token"] * found["num_tokens"] + bank
    return {
        "tokens": found["num_tokens"],
        "predicted": predicted,
        "measured": found["peak_bytes"],
        "error": predicted / found["peak_bytes"] - 1,
    }


def _durations(child: _Child, model: ModelPlan, piece: Piece, flush: Flush) -> None:
    for case in model.durations:
        _record(piece, flush, "duration", case.name, partial(_duration, child, case))


def _duration(child: _Child, case: DurationCase) -> dict[str, Any]:
    task = _duration_task(case)
    planned = child.ask("plan", task, num_rows=case.num_rows)
    limits = {key: planned[key] for key in ("max_slots", "max_tokens_per_step", "max_tokens_per_pass")}
    found = child.ask("run", task | limits, num_rows=case.num_rows)
    return {
        "tokens": planned["max_tokens_per_step"],
        "predicted": planned["duration_s"],
        "measured": found["duration_s"],
        "error": planned["duration_s"] / found["duration_s"] - 1,
    }


class _Child:
    """Sends requests about tasks on one model to processes of their own."""

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


def in_child(request: dict[str, Any], module: str = "benchmarks.memory.child") -> dict[str, Any]:
    """Return the answer of ``module`` in a process of its own: ``child.py``, or another that reads a request on stdin
    and writes its result on the last line of stdout, both JSON.

    Raises:
        RuntimeError: The process ended without an answer; the message has the last line of its stderr, all of which is
            passed on.
    """
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=ROOT,
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    sys.stderr.write(done.stderr)
    if done.returncode:
        last_line = (done.stderr.strip() or "nothing").splitlines()[-1]
        raise RuntimeError(f"its process ended with exit code {done.returncode} and said: {last_line}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def _save(model: ModelPlan, plan: Plan, folder: Path) -> None:
    """Save a model with random weights and a tokenizer in the form that ``from_pretrained`` reads."""
    from transformers import AutoTokenizer

    from alto.backbone import resolve_model

    AutoTokenizer.from_pretrained(resolve_model("alto-tiny")).save_pretrained(folder)
    dtype = getattr(torch, plan.dtype)
    random_model(SHAPES[model.shape], device=torch.device("cpu"), dtype=dtype).save_pretrained(folder)


def _jobs(ranks: Sequence[int], batch_sizes: Sequence[int]) -> dict[str, Any]:
    """Return a task with a job for every rank and batch size."""
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
    models = {scale: [model.shape for model in plan.models] for scale, plan in PLANS.items()}
    return piece_options(__doc__, models, STAGES, arguments)
