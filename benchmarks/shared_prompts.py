"""Compares preference pairs whose prompt goes through the model once with two whole conversations, as in most trainers.

    python -m benchmarks.paper shared-prompts --scale cpu

DPO steps of several jobs run on ``pref_mix``, and on each of its sources, whose prompts have different lengths. Both
ways take turns, from the same adapters, in the same batches. The gate: every step has the same losses in both ways.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from alto import Task
from alto.backbone import load_backbone
from alto.data import Encoding, TaskData, read_task_rows, tokenize
from alto.executor import BankSize, MicroBatches, TaskContext, build_trainer, initial_states, with_references
from alto.spec import BaseModelSpec
from benchmarks.common import PREFERENCE_PAIRS, format_table, option_parser, publish_figures
from benchmarks.rows import read_rows, write_rows
from benchmarks.turns import by_turns, median_seconds

MODEL = "alto-tiny"
ALL = "all"
MAX_TOKENS = 4096
NUM_JOBS, RANK, BATCH_SIZE = 4, 16, 4
TOLERANCE = 1e-4
"""Relative tolerance of losses: both ways add in other orders, and training carries the difference on."""

GOALS = {"shared_over_whole": (">=", 1.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Number of pairs of the mixture, and of each of its sources if ``by_source``, cut at ``max_length``; and of
    steps."""

    by_source: bool
    num_pairs: int
    max_length: int
    num_steps: int


SIZES = {
    "smoke": Size(by_source=False, num_pairs=24, max_length=128, num_steps=2),
    "cpu": Size(by_source=True, num_pairs=320, max_length=512, num_steps=15),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = option_parser(__doc__, SIZES, dataset=PREFERENCE_PAIRS, threads=True).parse_args(arguments)
    size = SIZES[options.scale]
    torch.set_num_threads(options.threads)
    pairs = read_pairs(options.dataset)
    sources = [ALL, *(sorted({pair["source"] for pair in pairs}) if size.by_source else [])]
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for source in sources:
        chosen = [pair for pair in pairs if source in (ALL, pair["source"])]
        sample = random.Random(0).sample(chosen, min(size.num_pairs, len(chosen)))
        rows.append(measure(source, sample, size, failures))
        print(format_table(list(rows[-1]), [list(rows[-1].values())]), flush=True)
    return publish_figures(
        options,
        "shared_prompts",
        gate_failures=failures,
        figures=lambda: {"shared_over_whole": rows[0]["speedup"]},
        goals=GOALS,
        rows=[] if failures else rows,
        notes=[
            f"Steps of {NUM_JOBS} jobs, batch size {BATCH_SIZE}, rank {RANK}, DPO; pairs cut at {size.max_length} "
            "tokens. shared_over_whole is of the first row; seconds are medians, the two ways taking turns.",
        ],
    )


def measure(source: str, pairs: Sequence[dict[str, str]], size: Size, failures: list[str]) -> dict[str, Any]:
    """Return the row of ``pairs``."""
    ways = {name: _Way(pairs, size, share_prompts=name == "shared") for name in ("whole", "shared")}
    rounds = list(by_turns({name: way.step for name, way in ways.items()}, size.num_steps))
    for step, found in enumerate(rounds):
        for shared, whole in zip(found["shared"][0], found["whole"][0], strict=True):
            if not abs(shared - whole) <= TOLERANCE * abs(whole):
                failures.append(f"{source}: step {step}: loss {shared} with shared prompts, {whole} without")
    medians = median_seconds(rounds)
    return {
        "source": source,
        "pairs": len(pairs),
        "whole_tokens": ways["whole"].tokens_per_pair,
        "shared_tokens": ways["shared"].tokens_per_pair,
        "whole_s": medians["whole"],
        "shared_s": medians["shared"],
        "speedup": medians["whole"] / medians["shared"],
    }


class _Way:
    """Jobs on pairs that are laid out in one way."""

    def __init__(self, pairs: Sequence[dict[str, str]], size: Size, *, share_prompts: bool) -> None:
        backbone = load_backbone(BaseModelSpec(id=MODEL))
        with tempfile.TemporaryDirectory() as folder:
            task = Task(
                model=MODEL,
                dataset=write_rows(Path(folder) / "pairs.jsonl", pairs),
                validation_split=0.1,
                method="dpo",
                max_length=size.max_length,
                r=RANK,
                per_device_train_batch_size=BATCH_SIZE,
                search_space={"learning_rate": [1e-4 * (job + 1) for job in range(NUM_JOBS)]},
            )
            conversations = read_task_rows(task)
        encoding = Encoding(tokenizer=backbone.tokenizer, max_length=size.max_length, shares_prompts=share_prompts)
        train, validation = (
            tokenize(split, encoding, what)
            for what, split in (("training", conversations.train), ("validation", conversations.validation))
        )
        self.tokens_per_pair = train.num_tokens / len(train)
        micro_batches = MicroBatches(MAX_TOKENS, lambda event: None, can_retry=True)
        context = TaskContext.of(task, backbone, TaskData(train=train, validation=validation))
        context = with_references(context, micro_batches)
        self._jobs = initial_states(context)
        size = BankSize.of(context.jobs, backbone, num_slots=NUM_JOBS)
        self._trainer = build_trainer(backbone, size, micro_batches)
        for slot, job in enumerate(self._jobs):
            job.slot = slot
            self._trainer.admit(job, slot)

    def step(self) -> list[float]:
        """Take a step, and return the losses of all jobs."""
        losses = list(self._trainer.step(self._jobs))
        for job in self._jobs:
            job.step += 1
        return losses


def read_pairs(path: Path) -> list[dict[str, str]]:
    """Return all pairs of the mixture whose replies differ."""
    return [pair for pair in read_rows(path) if pair["chosen"].strip() != pair["rejected"].strip()]
