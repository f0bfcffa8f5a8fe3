"""Compares preference tuning with the way of today's users: 40 LoRA configurations of DPO on one base model.

``sequential`` is TRL's ``DPOTrainer`` with PEFT, one job at a time. ``batched`` is ALTO with every job trained to its
end, and ``early_exit`` is ALTO with its default policy. All train the same jobs from the same adapters on the same
pairs in the same order, and evaluate at the same steps. ALTO repeats both ways with other seeds. PEFT judges each best
adapter on held-out pairs.

    python -m benchmarks.paper dpo --scale cpu
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from alto import Task
from alto.backbone import Backbone, load_backbone, resolve_model
from alto.data.source import carve_rows
from alto.errors import DataFormatError
from alto.spec import BaseModelSpec, Job
from benchmarks.baselines.job import BaselineJob, JobSettings
from benchmarks.baselines.pairs import PreparedPairs, prepare_pairs, tokenize_pairs
from benchmarks.baselines.start import first_adapter
from benchmarks.baselines.trl_pairs import train_on_pairs
from benchmarks.common import PREFERENCE_PAIRS, option_parser, publish_figures
from benchmarks.dpo.gate import gate_failures
from benchmarks.dpo.judge import Judge
from benchmarks.dpo.measured import Measured, Tuned
from benchmarks.dpo.summary import best_loss, figures, notes, rows
from benchmarks.end_to_end.plans import LEARNING_RATE_FACTOR, PAPER_LEARNING_RATES
from benchmarks.end_to_end.systems import eval_steps, observed, tune
from benchmarks.rows import read_rows

SOURCE = "rasbt/"
"""Source in the mixture from which such a small model can learn: the chosen reply is the more polite one."""

_PAIR_KEYS = ("prompt", "chosen", "rejected")

BETA = 0.1
EVAL_STEPS = 0.1
"""Share of a job's steps between two evaluations; the rungs of the default policy are additional."""

DATA_SEED = 42

GOALS = {
    "batched_over_sequential": (">=", 2.0),
    "early_exit_over_sequential": (">=", 16.0),
    "accuracy_delta_points": ("<=", 0.5),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of the sweep at one scale.

    Attributes:
        train, validation, heldout: Numbers of pairs to train on, to choose by, and to judge the chosen adapter on.
        seeds: Seeds of the jobs; TRL trains only those of the first seed.
    """

    train: int
    validation: int
    heldout: int
    epochs: int
    max_length: int
    learning_rates: tuple[float, ...]
    ranks: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    seeds: tuple[int, ...]


SIZES = {
    "smoke": Size(
        train=24,
        validation=8,
        heldout=16,
        epochs=1,
        max_length=256,
        learning_rates=(2e-3,),
        ranks=(8,),
        batch_sizes=(4, 8),
        seeds=(1, 2),
    ),
    "cpu": Size(
        train=160,
        validation=64,
        heldout=525,
        epochs=1,
        max_length=256,
        learning_rates=tuple(LEARNING_RATE_FACTOR * rate for rate in PAPER_LEARNING_RATES),
        ranks=(16, 64),
        batch_sizes=(2, 4, 8, 16),
        seeds=(1, 2, 3),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = option_parser(__doc__, SIZES, model="alto-tiny", dataset=PREFERENCE_PAIRS, threads=True)
    options = parser.parse_args(arguments)
    size = SIZES[options.scale]
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(size, options.model, options.dataset, Path(folder))
        failures = gate_failures(measured)
        return publish_figures(
            options,
            "dpo",
            gate_failures=failures,
            figures=lambda: figures(measured),
            goals=GOALS,
            rows=[] if failures else rows(measured),
            notes=[*about(size, options.model, options.dataset), *([] if failures else notes(measured))],
        )


def measure(size: Size, model: str, data: Path, folder: Path) -> Measured:
    """Run the three systems on the first seed, with ``sequential`` in two halves around the others, so that a slow hour
    affects all of them. Then run ALTO's two ways on the other seeds."""
    train, validation, heldout = carve_rows(read_pairs(data), (size.train, size.validation, size.heldout), DATA_SEED)
    for name, pairs in (("train", train), ("validation", validation)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    tasks = {seed: make_task(size, model, folder, seed) for seed in size.seeds}
    prepared = prepare_pairs(resolve_model(model), train, validation, folder, max_length=size.max_length)
    judges = {
        "validation": Judge(prepared, prepared.validation.to_list(), BETA),
        "heldout": Judge(prepared, tokenize_pairs(prepared.tokenizer, heldout, max_length=size.max_length), BETA),
    }
    backbone = load_backbone(BaseModelSpec(id=model))
    first = tasks[size.seeds[0]]
    found = dict(sequential(first, prepared, backbone, first.jobs[::2]))
    batched, early_exit = {}, {}
    for seed, task in tasks.items():
        batched[seed] = tuned(observed(task), judges, folder / "runs")
        early_exit[seed] = tuned(task, judges, folder / "runs")
        if task is first:
            found |= dict(sequential(first, prepared, backbone, first.jobs[1::2]))
    return Measured(
        sequential={job.id: found[job.id] for job in first.jobs},
        sequential_s=prepared.duration_s + sum(job.duration_s for job in found.values()),
        batched=batched,
        early_exit=early_exit,
        num_train=size.train,
        num_validation=size.validation,
        num_heldout=size.heldout,
    )


def tuned(task: Task, judges: dict[str, Judge], output_dir: Path) -> Tuned:
    """Run ``alto tune`` for a user who has never used this base with these pairs."""
    result, duration_s = tune(task, output_dir)
    return Tuned(
        result=result,
        duration_s=duration_s,
        **{name: judge.worth(result.adapter_dir) for name, judge in judges.items()},
    )


def sequential(
    task: Task, prepared: PreparedPairs, backbone: Backbone, jobs: Sequence[Job]
) -> Iterator[tuple[str, BaselineJob]]:
    """Train ``jobs`` with TRL, one after the other."""
    for number, job in enumerate(jobs, start=1):
        found = train_on_pairs(
            prepared,
            job.config.model_dump(),
            start=first_adapter(backbone, job.config),
            eval_at_steps=eval_steps(task, JobSettings.of(job.config.model_dump()), len(prepared.train)),
        )
        print(f"trl {number}/{len(jobs)} {job.id}: {found.duration_s:.1f} s, best {best_loss(found):.4f}", flush=True)
        yield job.id, found


def make_task(size: Size, model: str, folder: Path, seed: int) -> Task:
    """Return the sweep as a task on the files in ``folder``, so that every system reads the same."""
    return Task(
        name=f"dpo-{seed}",
        method="dpo",
        beta=BETA,
        model=model,
        dataset=str(folder / "train.jsonl"),
        validation_dataset=str(folder / "validation.jsonl"),
        max_length=size.max_length,
        num_train_epochs=size.epochs,
        eval_steps=EVAL_STEPS,
        lora_alpha="2*r",
        seed=seed,
        search_space={
            "learning_rate": list(size.learning_rates),
            "r": list(size.ranks),
            "per_device_train_batch_size": list(size.batch_sizes),
        },
    )


def read_pairs(path: Path) -> list[dict[str, str]]:
    """Return the pairs in the file, each prompt once, without pairs whose replies are equal; of our mixture only those
    of ``SOURCE``.

    Raises:
        DataFormatError: A row is not a pair.
    """
    rows = read_rows(path)
    for row in rows:
        if not all(isinstance(row.get(key), str) for key in _PAIR_KEYS):
            raise DataFormatError(
                f"{path}: expected rows with texts {', '.join(_PAIR_KEYS)}, found {', '.join(row)}; rename the columns"
            )
    if path.resolve() == PREFERENCE_PAIRS.resolve():
        rows = [row for row in rows if row["source"].startswith(SOURCE)]
    pairs = [{key: row[key] for key in _PAIR_KEYS} for row in rows]
    chosen = {pair["prompt"]: pair for pair in pairs if pair["chosen"].strip() != pair["rejected"].strip()}
    return list(chosen.values())


def about(size: Size, model: str, data: Path) -> list[str]:
    """Return a description of the run, in sentences."""
    return [
        f"{model}; {size.train} pairs of {data.parent.name}/{data.name} to train on, {size.epochs} epochs; "
        f"{size.validation} to choose by; {size.heldout} held out, on which PEFT judges the winners. beta {BETA} "
        "throughout, because losses under different betas cannot be compared; "
        f"the paper's learning rates times {LEARNING_RATE_FACTOR}.",
        f"ALTO's two ways on {len(size.seeds)} seeds, TRL on the first; times are those of the first.",
        "Every system computes in float32; TRL's default on a CPU is bfloat16 autocast.",
        "In favour of sequential: gradient checkpointing off (TRL's default is on), rows tokenised and the base model "
        "loaded once, reference log-probabilities kept by TRL for jobs of the same rank, no checkpoints saved, "
        "validation rows sorted by length. ALTO begins each run with an empty cache.",
    ]
