"""Record the paper's grid of preference tuning, with every job trained to its end: ``dpo-alto-tiny-1``, ``-2`` and
``-3`` of ``benchmarks/recordings``, which differ in their seeds.

The jobs are those of the benchmark ``dpo``, on more pairs and validated at more points, so that policies with other
rungs can be judged on them. A recording takes 7 to 15 minutes, most of it for evaluations.

    python -m tools.record_preferences --seeds 1 2 3
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from alto import EarlyExit, Engine, Task
from alto.data.source import carve_rows
from alto.early_exit import Recording
from alto.runs import read_entries
from benchmarks.common import PREFERENCE_PAIRS
from benchmarks.dpo.program import DATA_SEED, SIZES, Size, make_task, read_pairs

RECORDINGS = Path(__file__).resolve().parents[1] / "benchmarks" / "recordings"
SIZE = replace(SIZES["cpu"], train=384, validation=160)
POINTS = (0.01, 0.025, 0.05)
"""Shares of a job's steps at which it is validated, besides every tenth."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", choices=SIZE.seeds, default=SIZE.seeds)
    parser.add_argument("--output", type=Path, default=RECORDINGS)
    options = parser.parse_args(arguments)
    for seed in options.seeds:
        began = time.perf_counter()
        path = options.output / f"dpo-alto-tiny-{seed}.json.gz"
        record(SIZE, seed).write(path)
        print(f"{path}: {time.perf_counter() - began:.0f} s", flush=True)
    return 0


def record(size: Size, seed: int) -> Recording:
    """Return the curves of every job of the sweep with ``seed``."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result = Engine(output_dir=folder / "runs").tune(plan(size, seed, folder))
        return Recording.from_journal(read_entries(Path(result.run_dir) / "journal.jsonl"))


def plan(size: Size, seed: int, folder: Path) -> Task:
    """Return the sweep as a task that ends no job early; its pairs are written into ``folder``."""
    train, validation, _ = carve_rows(
        read_pairs(PREFERENCE_PAIRS), (size.train, size.validation, size.heldout), DATA_SEED
    )
    for split, pairs in (("train", train), ("validation", validation)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    rungs = tuple((point, 1.0) for point in POINTS)
    everything = EarlyExit(rungs=rungs, detect_divergence=False, detect_overfitting=False, evaluation_share="all")
    return make_task(size, "alto-tiny", folder, seed).replace(early_exit=everything, report_to="none")


if __name__ == "__main__":
    raise SystemExit(main())
