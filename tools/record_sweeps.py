"""Record the sweeps on which early-exit policies are judged, with every job trained to its end and validated at many
points.

Each recording has its own training, validation and test rows; nothing is trained on the test rows or selected by them.
A recording is made in parts of 8 to 16 jobs, and each part is a run. A part that is on disk is not made again.
``--list`` shows the recordings. Recordings on ``alto-small`` need its folder, which this command makes::

    python -m tools.train_base --size small --data ../shared/data --output build/alto-small

    python -m tools.record_sweeps --data ../shared/data --small build/alto-small --only gsm8k-warmup

A part takes 10 to 25 minutes on a quiet core, most of them for evaluations.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from alto import EarlyExit, Engine, Task
from alto.data.source import carve_rows, sample_rows
from alto.early_exit import Recording
from alto.runs import read_entries

RECORDINGS = Path(__file__).resolve().parents[1] / "benchmarks" / "recordings"
POINTS = (0.005, 0.01, 0.025, 0.05, 0.15)
"""Shares of a job's steps at which it is validated, besides every tenth."""

OBSERVE = EarlyExit(
    rungs=tuple((point, 1.0) for point in POINTS),
    detect_divergence=False,
    detect_overfitting=False,
    evaluation_share="all",
)
"""Early-exit settings that evaluate at all points and end no job."""

SHORT_SOURCES = ("rasbt/instruction-data-with-preference", "pandalm/testset-v1", "hh-rlhf/harmless-base/test")
MAX_PAIR_CHARS = 900
DATA_SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One recording.

    Attributes:
        what: The purpose of the recording beside the others.
        file: File of the rows, relative to the data folder.
        rows: Numbers of training, validation and test rows.
        spaces: Search space of every part.
        fixed: Further keys of the task.
        base: ``alto-tiny`` or ``alto-small``.
        columns: Column of the rows for each role.
    """

    what: str
    file: str
    rows: tuple[int, int, int]
    spaces: tuple[Mapping[str, Any], ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    base: str = "alto-tiny"
    columns: Mapping[str, str] = field(default_factory=dict)


_MATHS = {"file": "gsm8k/train.jsonl", "columns": {"prompt": "question", "completion": "answer"}}
_INSTRUCTIONS = {
    "file": "instruct_gpteacher/train.jsonl.gz",
    "columns": {"prompt": "prompt", "completion": "response"},
}
_REASONING = {
    "file": "reasoning_mistral/train.jsonl.gz",
    "columns": {"system": "system", "prompt": "prompt", "completion": "response"},
}
_RATES = [3e-4, 1e-3, 3e-3, 1e-2]


PLANS: Mapping[str, Plan] = {
    "gsm8k-warmup": Plan(
        what="learning-rate warmup of 3 and 10 %, cosine, 500 and 1,000 steps",
        **_MATHS,
        rows=(1000, 50, 100),
        spaces=tuple(
            {
                "lr": _RATES,
                "paired": {"r": ranks, "per_device_train_batch_size": [1, 2]},
                "warmup_ratio": [0.03, 0.1],
            }
            for ranks in ([8, 32], [16, 4])
        ),
        fixed={"lr_scheduler_type": "cosine", "num_train_epochs": 1},
    ),
    "instructions-epochs": Plan(
        what="six epochs on few rows: winners peak early",
        **_INSTRUCTIONS,
        rows=(240, 50, 100),
        spaces=tuple({"lr": _RATES, "r": [4, 16, 64], "per_device_train_batch_size": [size]} for size in (2, 1)),
        fixed={"num_train_epochs": 6},
    ),
    "reasoning": Plan(
        what="long rows, 500 steps, warmup of 0 and 6 %",
        **_REASONING,
        rows=(500, 30, 60),
        spaces=tuple(
            {"lr": _RATES, "r": ranks, "per_device_train_batch_size": [1], "warmup_ratio": [0.0, 0.06]}
            for ranks in ([8, 32], [4, 16])
        ),
        fixed={"lr_scheduler_type": "cosine", "max_length": 512, "num_train_epochs": 1},
    ),
    "dpo-seeds": Plan(
        what="preferences, 500 validation pairs, three seeds",
        file="pref_mix/pairs.jsonl.gz",
        rows=(1000, 500, 200),
        spaces=tuple(
            {
                "lr": [1e-4, 5e-4, 2e-3, 5e-3],
                "paired": {"r": [8, 32], "per_device_train_batch_size": [1, 2]},
                "seed": [seed],
            }
            for seed in (1, 2, 3)
        ),
        fixed={"method": "dpo", "beta": 0.1, "warmup_ratio": 0.05, "lr_scheduler_type": "cosine"},
        columns={"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    ),
    "gsm8k-small": Plan(
        what="a base of ten million parameters",
        **_MATHS,
        rows=(500, 40, 80),
        spaces=tuple({"lr": _RATES, "r": ranks, "per_device_train_batch_size": [1]} for ranks in ([8, 32], [4, 16])),
        fixed={"lr_scheduler_type": "cosine", "warmup_ratio": 0.03, "num_train_epochs": 1},
        base="alto-small",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--small", type=Path, help="folder of alto-small")
    parser.add_argument("--only", nargs="*", choices=PLANS, default=list(PLANS))
    parser.add_argument("--output", type=Path, default=RECORDINGS)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list or options.data is None:
        for name, plan in PLANS.items():
            print(f"{name:<20} {plan.what}")
        return 0 if options.list else 2
    for name in options.only:
        if PLANS[name].base == "alto-small" and options.small is None:
            print(f"{name}: expected --small FOLDER, found none; tools/train_base.py makes it", file=sys.stderr)
            return 2
    for name in options.only:
        began = time.perf_counter()
        recording = join([part(name, number, options) for number in range(len(PLANS[name].spaces))])
        path = options.output / f"{name}.json.gz"
        recording.write(path)
        print(f"{name}: {len(recording.jobs)} jobs, {path.stat().st_size / 1e6:.2f} MB", end="")
        print(f", {time.perf_counter() - began:.0f} s", flush=True)
    return 0


def part(name: str, number: int, options: argparse.Namespace) -> Recording:
    """Return one part of a recording, from disk or made now."""
    path: Path = options.output / "parts" / f"{name}-{number + 1}.json.gz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        record(name, PLANS[name], number, options.data, options.small).write(path)
        print(f"{path.name}: {time.perf_counter() - began:.0f} s", flush=True)
    return Recording.read(path)


def join(parts: Sequence[Recording]) -> Recording:
    """Return the jobs of all parts as the jobs of one sweep."""
    jobs = [job for one in parts for job in one.jobs]
    return replace(parts[0], jobs=tuple(replace(job, job=f"job-{index:03d}") for index, job in enumerate(jobs)))


def record(name: str, plan: Plan, number: int, data: Path, small: Path | None) -> Recording:
    """Train every job of a part of ``plan`` to its end."""
    with tempfile.TemporaryDirectory() as folder:
        task = make_task(name, plan, number, data, small, Path(folder))
        result = Engine(output_dir=Path(folder) / "runs").tune(task)
        recording = Recording.from_journal(read_entries(Path(result.run_dir) / "journal.jsonl"))
        return replace(recording, task={**recording.task, "base": plan.base, "dataset": plan.file, "what": plan.what})


def make_task(name: str, plan: Plan, number: int, data: Path, small: Path | None, folder: Path) -> Task:
    """Return the task of a part of ``plan``; its rows are written into ``folder``."""
    files = {}
    for split, rows in zip(("train", "validation", "test"), carved(plan, data), strict=True):
        files[split] = folder / f"{split}.jsonl"
        files[split].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = Task(
        name=name,
        model=plan.base if plan.base == "alto-tiny" else str(small),
        dataset=str(files["train"]),
        validation_dataset=str(files["validation"]),
        test_dataset=str(files["test"]),
        test_jobs="all",
        columns=plan.columns,
        search_space=plan.spaces[number],
        early_exit=OBSERVE,
        eval_steps=0.1,
        report_to="none",
        **plan.fixed,
    )
    return task.replace(max_slots=len(task.jobs))


def carved(plan: Plan, data: Path) -> list[list[dict[str, Any]]]:
    """Return the rows of the three splits, without columns that nothing reads."""
    path = data / plan.file
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    if "source" in rows[0]:
        rows = [row for row in rows if row["source"] in SHORT_SOURCES and _num_chars(row) <= MAX_PAIR_CHARS]
    rows = [{column: row[column] for column in plan.columns.values()} for row in rows]
    return carve_rows(sample_rows(rows, sum(plan.rows), DATA_SEED), plan.rows, DATA_SEED)


def _num_chars(row: Mapping[str, Any]) -> int:
    return sum(len(row[column]) for column in ("prompt", "chosen", "rejected"))


if __name__ == "__main__":
    raise SystemExit(main())
