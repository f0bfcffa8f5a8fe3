"""The main job against what a user does today: the paper's 60 LoRA configurations on GSM8K, one base model.

``sequential`` is TRL + PEFT, one job at a time; ``batched`` is ALTO with every job trained to its end, ``early_exit``
ALTO with its default policy. All train the same jobs on the same rows in the same order and evaluate at the same steps.
The curves of ``batched`` are kept as a recording, on which policies are judged by replay.

    python -m benchmarks.paper end-to-end --scale cpu
"""

from __future__ import annotations

import copy
import json
import math
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from alto import EarlyExit, Engine, Task, TaskResult
from alto.backbone import resolve_model
from alto.data import sample_rows, split_rows
from alto.early_exit import Recording, ReplayResult, evaluation_steps, policy_from, replay
from alto.runs import read_entries
from alto.spec import Job
from benchmarks.baselines.bare_peft import bare_peft_one
from benchmarks.baselines.job import BaselineJob, Prepared, prepare
from benchmarks.baselines.trl_sequential import train_one
from benchmarks.common import GSM8K, Result, option_parser, publish

PAPER_LEARNING_RATES = (1e-5, 5e-5, 2e-4, 3e-4, 5e-4)
LEARNING_RATE_FACTOR = 10
"""The paper's learning rates are for 7B models and more; the tiny base needs larger ones."""

EVAL_STEPS = 0.1
"""Share of a job's steps between two evaluations; the default policy's rungs come on top."""

GOALS = {
    "batched_over_sequential": (">=", 2.5),
    "early_exit_over_sequential": (">=", 16.0),
    "best_loss_ratio": ("<=", 1.002),
    "samples_saved": (">=", 0.91),
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
    "cpu": Size(rows=120, epochs=2, max_length=512, **FULL_GRID),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = option_parser(__doc__, SIZES, model="alto-tiny", dataset=GSM8K, threads=True)
    parser.add_argument("--recording", type=Path, help="where the curves of all jobs go (.json.gz)")
    options = parser.parse_args(arguments)
    size = SIZES[options.scale]
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        task = make_task(size, options.model, options.dataset, Path(folder))
        prepared = prepare(
            resolve_model(task.model),
            _read(Path(task.dataset)),
            _read(Path(str(task.validation_dataset))),
            max_length=task.max_length,
        )
        failures = baseline_gate(task, prepared)
        if failures:
            measured = None
        else:
            measured = measure(task, prepared, Path(folder) / "runs")
            failures = outcome_gate(measured, prepared)
        if measured is not None and options.recording is not None:
            measured.recording.write(options.recording)
    result = Result.of(
        benchmark="sweep",
        scale=options.scale,
        gate_failures=failures,
        figures=figures(measured) if measured is not None else {},
        goals=GOALS if options.scale == "cpu" else {},
        rows=table_rows(measured) if measured is not None else [],
        notes=notes(size),
    )
    return publish(result, options.out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the three systems did.

    Attributes:
        sequential: TRL's jobs by job id.
        sequential_s: Loading and tokenising once, and all of its jobs.
        batched, early_exit: Results of ALTO to the end of every job, and with the default policy.
        batched_s, early_exit_s: From the call to the exported adapter and report: loading, tokenising, training,
            evaluating, checkpoints.
        recording: The curves of ``batched``.
    """

    task: Task
    sequential: Mapping[str, BaselineJob]
    sequential_s: float
    batched: TaskResult
    batched_s: float
    early_exit: TaskResult
    early_exit_s: float
    recording: Recording


def measure(task: Task, prepared: Prepared, output_dir: Path) -> Measured:
    """Run the three systems; ``sequential`` in two halves around the others, so that a slow hour hits all of them."""
    jobs = {job.id: job for job in task.jobs}
    found = dict(sequential(task, prepared, list(task.jobs)[::2]))
    batched, batched_s = tune(observed(task), output_dir)
    early_exit, early_exit_s = tune(task, output_dir)
    found |= dict(sequential(task, prepared, list(task.jobs)[1::2]))
    return Measured(
        task=task,
        sequential={job: found[job] for job in jobs},
        sequential_s=prepared.duration_s + sum(job.duration_s for job in found.values()),
        batched=batched,
        batched_s=batched_s,
        early_exit=early_exit,
        early_exit_s=early_exit_s,
        recording=Recording.from_journal(read_entries(Path(batched.run_dir) / "journal.jsonl")),
    )


def observed(task: Task) -> Task:
    """``task`` with evaluations where its policy has them, and no job ended early."""
    rungs = tuple((rung.progress, 1.0) for rung in task.early_exit.selection_rungs)
    return task.replace(early_exit=EarlyExit(rungs=rungs, detect_divergence=False, detect_overfitting=False))


def tune(task: Task, output_dir: Path) -> tuple[TaskResult, float]:
    """What ``alto tune`` does, and how long it takes, seconds."""
    start = time.perf_counter()
    result = Engine(output_dir=output_dir).tune(task)
    duration_s = time.perf_counter() - start
    print(
        f"alto: {duration_s:.1f} s, best {result.best_job} {result.best_validation_loss:.4f}, "
        f"{result.samples_saved:.1%} of samples saved",
        flush=True,
    )
    return result, duration_s


def figures(measured: Measured) -> dict[str, float]:
    paper = replayed(measured, EarlyExit(policy="paper"))
    return {
        "batched_over_sequential": measured.sequential_s / measured.batched_s,
        "early_exit_over_sequential": measured.sequential_s / measured.early_exit_s,
        "best_loss_ratio": measured.early_exit.best_validation_loss / measured.batched.best_validation_loss,
        "samples_saved": measured.early_exit.samples_saved,
        "paper_best_loss_ratio": paper.regret,
        "paper_samples_saved": paper.samples_saved,
        "sequential_s": measured.sequential_s,
        "sequential_eval_s": sum(job.eval_s for job in measured.sequential.values()),
        "batched_s": measured.batched_s,
        "early_exit_s": measured.early_exit_s,
        "best_loss_over_sequential": measured.early_exit.best_validation_loss
        / min(_best_loss(job) for job in measured.sequential.values()),
    }


def replayed(measured: Measured, settings: EarlyExit) -> ReplayResult:
    return replay(measured.recording, policy_from(settings), settings.ema_alpha)


def table_rows(measured: Measured) -> list[dict[str, Any]]:
    """One row per job, and one per policy replayed on the recording."""
    early = {job.job: job for job in measured.early_exit.job_results}
    jobs = [
        {
            "job": job.job,
            "learning_rate": job.config["learning_rate"],
            "r": job.config["r"],
            "per_device_train_batch_size": job.config["per_device_train_batch_size"],
            "sequential_s": measured.sequential[job.job].duration_s,
            "sequential_eval_s": measured.sequential[job.job].eval_s,
            "sequential_best_loss": _best_loss(measured.sequential[job.job]),
            "batched_best_loss": job.best_validation_loss,
            "early_exit_best_loss": early[job.job].best_validation_loss,
            "exit": early[job.job].exit_reason,
            "steps": early[job.job].steps,
            "total_steps": job.total_steps,
        }
        for job in measured.batched.job_results
    ]
    policies = [
        {
            "policy": policy,
            "regret": result.regret,
            "samples_saved": result.samples_saved,
            **{f"saved_{reason}": share for reason, share in result.saved_by.items()},
        }
        for policy in ("alto", "paper")
        for result in [replayed(measured, EarlyExit(policy=policy))]
    ]
    return [*jobs, *policies]


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
        eval_steps=EVAL_STEPS,
        lora_alpha="2*r",
        search_space={
            "learning_rate": list(size.learning_rates),
            "r": list(size.ranks),
            "per_device_train_batch_size": list(size.batch_sizes),
        },
    )


def sequential(task: Task, prepared: Prepared, jobs: Sequence[Job]) -> Iterable[tuple[str, BaselineJob]]:
    """Train ``jobs`` with TRL, one after the other."""
    for number, job in enumerate(jobs, start=1):
        found = train_one(prepared, job.config.model_dump(), eval_at_steps=eval_steps(task, job, len(prepared.train)))
        print(f"trl {number}/{len(jobs)} {job.id}: {found.duration_s:.1f} s, best {_best_loss(found):.4f}", flush=True)
        yield job.id, found


def baseline_gate(task: Task, prepared: Prepared) -> list[str]:
    """What is wrong with the baseline's losses; empty when TRL and a bare PEFT loop agree.

    The first steps of the job with the largest batch, from the same initial weights, without any tuning in between.
    """
    job = max(task.jobs, key=lambda job: job.config.per_device_train_batch_size)
    few = _first_rows(prepared, GATE_STEPS * job.config.per_device_train_batch_size)
    config = job.config.model_dump() | {"num_train_epochs": 1}
    steps = [-(-len(few.train) // job.config.per_device_train_batch_size)]
    trl, bare = (train(few, config, eval_at_steps=steps) for train in (train_one, bare_peft_one))
    return _differences("the bare PEFT loop", _losses(trl), _losses(bare))


def outcome_gate(measured: Measured, prepared: Prepared) -> list[str]:
    """What is wrong with ALTO's losses; empty when they mean what TRL's and PEFT's mean.

    The first step of every job: adapters start as zero, so its loss is the base's on the same rows in the same order.
    And the adapter that came out, loaded by PEFT: its validation loss must be the one that ALTO reports.
    """
    recorded = {job.job: job.train_losses[0] for job in measured.recording.jobs}
    failures = []
    for job, found in measured.sequential.items():
        failures += _differences(f"ALTO, first step of {job}", [found.train_losses[0]], [recorded[job]])
    for name, result in (("batched", measured.batched), ("early exit", measured.early_exit)):
        loss = adapter_loss(prepared, result.adapter_dir)
        failures += _differences(f"best adapter of {name}", [loss], [result.best_validation_loss])
    return failures


@torch.no_grad()
def adapter_loss(prepared: Prepared, adapter_dir: str) -> float:
    """Validation loss of an adapter loaded by PEFT, row by row on the model's own forward pass."""
    model = PeftModel.from_pretrained(copy.deepcopy(prepared.model), adapter_dir).eval()
    total, tokens = 0.0, 0
    for row in prepared.validation:
        labels = torch.tensor([row["labels"]])
        count = int((labels[:, 1:] >= 0).sum())
        total += float(model(input_ids=torch.tensor([row["input_ids"]]), labels=labels).loss) * count
        tokens += count
    return total / tokens


def _differences(name: str, expected: Sequence[float], found: Sequence[float]) -> list[str]:
    close = (math.isclose(one, other, rel_tol=GATE_TOLERANCE) for one, other in zip(expected, found, strict=True))
    return [] if all(close) else [f"{name}: expected {list(expected)} within {GATE_TOLERANCE}, found {list(found)}"]


def _losses(job: BaselineJob) -> list[float]:
    return [*job.train_losses, *(item.loss for item in job.evaluations)]


def _best_loss(job: BaselineJob) -> float:
    return min(item.loss if math.isfinite(item.loss) else math.inf for item in job.evaluations)


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
