"""The main job against what a user does today: the paper's 60 LoRA configurations on GSM8K, one base model.

``sequential`` is TRL + PEFT, one job at a time; every other system trains the same jobs on the same rows in the same
order and evaluates at the same steps, and its time is divided into that of ``sequential``.

    python benchmarks/sweep.py --scale cpu
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from baselines.bare_peft import bare_peft_one
from baselines.job import BaselineJob, Prepared, prepare
from baselines.trl_sequential import train_one
from common import ROOT, SCALES, Result, publish

from alto.backbone.load import resolve_model
from alto.data import sample_rows, split_rows
from alto.early_exit import evaluation_steps
from alto.spec import Job, Task

PAPER_LEARNING_RATES = (1e-5, 5e-5, 2e-4, 3e-4, 5e-4)
LEARNING_RATE_FACTOR = 10
"""The paper's learning rates are for 7B models and more; the tiny base needs larger ones."""

GOALS = {
    "batched_over_sequential": (">=", 2.5),
    "early_exit_over_sequential": (">=", 12.0),
    "best_loss_ratio": ("<=", 1.005),
    "samples_saved": (">=", 0.85),
}
GATE_STEPS = 3
GATE_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of the paper's sweep one scale runs.

    Attributes:
        rows: Rows drawn from GSM8K before the 90/10 split.
    """

    rows: int
    epochs: int
    max_length: int
    learning_rates: tuple[float, ...]
    ranks: tuple[int, ...]
    batch_sizes: tuple[int, ...]


FULL_GRID: dict[str, Any] = {
    "learning_rates": tuple(LEARNING_RATE_FACTOR * rate for rate in PAPER_LEARNING_RATES),
    "ranks": (16, 32, 64),
    "batch_sizes": (1, 2, 4, 8),
}
SIZES = {
    "smoke": Size(rows=20, epochs=1, max_length=256, learning_rates=(2e-3,), ranks=(16,), batch_sizes=(2, 8)),
    "cpu": Size(rows=267, epochs=3, max_length=512, **FULL_GRID),
    "gpu": Size(rows=7473, epochs=3, max_length=512, **FULL_GRID),
}

Trainer = Callable[..., BaselineJob]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    size = SIZES[options.scale]
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        task = make_task(size, options.model, options.data, Path(folder))
        prepared = prepare(
            resolve_model(task.model),
            _read(Path(task.dataset)),
            _read(Path(str(task.validation_dataset))),
            max_length=task.max_length,
        )
        failures = gate(task, prepared)
        rows = [] if failures else list(sequential(task, prepared))
    result = Result.of(
        benchmark="sweep",
        scale=options.scale,
        gate_failures=failures,
        figures={} if failures else {"sequential_s": prepared.duration_s + sum(row["duration_s"] for row in rows)},
        goals=GOALS if options.scale == "cpu" else {},
        rows=rows,
        notes=notes(size),
    )
    return publish(result, options.output)


def make_task(size: Size, model: str, data: Path, folder: Path) -> Task:
    """The sweep as a task whose training and validation rows lie in files, so that every system reads the same."""
    seed = 42
    train, validation = split_rows(sample_rows(_read(data), size.rows, seed), 0.1, seed)
    for name, rows in (("train", train), ("validation", validation)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return Task(
        name="sweep",
        model=model,
        dataset=str(folder / "train.jsonl"),
        validation_dataset=str(folder / "validation.jsonl"),
        max_length=size.max_length,
        num_train_epochs=size.epochs,
        lora_alpha="2*r",
        search_space={
            "learning_rate": list(size.learning_rates),
            "r": list(size.ranks),
            "per_device_train_batch_size": list(size.batch_sizes),
        },
    )


def sequential(task: Task, prepared: Prepared) -> Iterable[dict[str, Any]]:
    """Train every job of the task with TRL, one after the other; a row each."""
    for number, job in enumerate(task.jobs, start=1):
        found = train_one(prepared, job.config.model_dump(), eval_at_steps=eval_steps(task, job, len(prepared.train)))
        best = min(found.evaluations, key=lambda item: item.loss if math.isfinite(item.loss) else math.inf)
        print(
            f"sequential {number}/{len(task.jobs)} {job.id}: {found.duration_s:.1f} s, best {best.loss:.4f}", flush=True
        )
        yield {
            "system": "sequential",
            "job": job.id,
            "duration_s": found.duration_s,
            "train_s": found.train_s,
            "eval_s": found.eval_s,
            "samples": found.samples,
            "best_validation_loss": best.loss,
            "best_step": best.step,
        }


def gate(task: Task, prepared: Prepared) -> list[str]:
    """What is wrong with the systems' losses; empty when the loss means the same in all of them.

    The first steps of the job with the largest batch, from the same initial weights, without any tuning in between.
    """
    job = max(task.jobs, key=lambda job: job.config.per_device_train_batch_size)
    count = GATE_STEPS * job.config.per_device_train_batch_size
    few = _first_rows(prepared, count)
    config = job.config.model_dump() | {"num_train_epochs": 1}
    steps = [-(-len(few.train) // job.config.per_device_train_batch_size)]
    systems: Mapping[str, Trainer] = {"trl": train_one, "bare_peft": bare_peft_one}
    losses = {}
    for name, train in systems.items():
        found = train(few, config, eval_at_steps=steps)
        losses[name] = (*found.train_losses, *(item.loss for item in found.evaluations))
    return [
        f"{job.id}, {name}: expected the losses of trl {losses['trl']} within {GATE_TOLERANCE}, found {values}."
        for name, values in losses.items()
        if not all(
            math.isclose(one, other, rel_tol=GATE_TOLERANCE) for one, other in zip(losses["trl"], values, strict=True)
        )
    ]


def eval_steps(task: Task, job: Job, num_train: int) -> tuple[int, ...]:
    """When a job is evaluated: the same in every system, rungs included."""
    batches = -(-num_train // job.config.per_device_train_batch_size)
    return evaluation_steps(batches * job.config.num_train_epochs, task.eval_steps, task.early_exit.selection_rungs)


def notes(size: Size) -> list[str]:
    return [
        f"{size.rows} of GSM8K's 7473 training rows, split 90/10, {size.epochs} epochs, rows cut at {size.max_length} "
        f"tokens; the paper's learning rates times {LEARNING_RATE_FACTOR}.",
        "Every system computes in float32; TRL's default on a CPU is bfloat16 autocast.",
        "In favour of sequential: gradient checkpointing off (TRL's default is on), rows tokenised and the base model "
        "loaded once, no checkpoints saved, validation rows sorted by length.",
    ]


def _first_rows(prepared: Prepared, count: int) -> Prepared:
    return Prepared(
        model=prepared.model,
        tokenizer=prepared.tokenizer,
        train=prepared.train[:count],
        validation=prepared.validation[:8],
        duration_s=prepared.duration_s,
    )


def _read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=SCALES, default="smoke")
    parser.add_argument("--model", default="alto-tiny")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
