"""Early-exit policies by replay on the recorded sweeps: what each saves, and what it loses of the winner.

A recording holds the curves of a sweep whose every job was trained to its end, so any policy can be asked what it would
have done. Nothing is trained here.

    python benchmarks/policies.py --scale cpu
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import RESULTS_DIR, ROOT, Result, publish

from alto import EarlyExit
from alto.early_exit import Recording, ReplayResult, policy_from, replay

RECORDINGS = ROOT / "benchmarks" / "recordings"
POLICIES: Mapping[str, EarlyExit] = {
    "default": EarlyExit(),
    "cautious": EarlyExit(preset="cautious"),
    "greedy": EarlyExit(preset="greedy"),
    "two rungs": EarlyExit(rungs=((0.025, 0.5), (0.05, 0.2))),
    "two rungs, whole steps": EarlyExit(rungs=((0.025, 0.5), (0.05, 0.2)), equal_shares=False),
    "paper": EarlyExit(policy="paper"),
}
"""``two rungs, whole steps`` was the default of version 0.1."""

SMOKE_JOBS = 8
GOALS = {
    "saved_default": (">=", 0.9),
    "worse_than_paper": ("<=", 0.0),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    recordings = {path.name.removesuffix(".json.gz"): Recording.read(path) for path in sorted(RECORDINGS.glob("*.gz"))}
    if options.scale == "smoke":
        recordings = {name: replace(found, jobs=found.jobs[:SMOKE_JOBS]) for name, found in recordings.items()}
    rows = [row(name, found, policy) for name, found in recordings.items() for policy in POLICIES]
    result = Result.of(
        benchmark="policies",
        scale=options.scale,
        gate_failures=[failure for name, found in recordings.items() for failure in gate(name, found)],
        figures=figures(rows),
        goals=GOALS if options.scale == "cpu" else {},
        rows=rows,
    )
    return publish(result, options.output)


def row(name: str, recording: Recording, policy: str) -> dict[str, Any]:
    """What ``policy`` does on ``recording``."""
    result = run(recording, POLICIES[policy])
    return {
        "recording": name,
        "policy": policy,
        "samples_saved": result.samples_saved,
        "winner": result.winner,
        "regret": result.regret,
        "improvement_lost": improvement_lost(recording, result),
        **{f"saved_{reason}": share for reason, share in result.saved_by.items()},
    }


def run(recording: Recording, settings: EarlyExit) -> ReplayResult:
    settings = settings.resolved(lr_warmup=recording.lr_warmup)
    return replay(recording, policy_from(settings), settings.ema_alpha)


def improvement_lost(recording: Recording, result: ReplayResult) -> float:
    """Share of the best job's improvement on the frozen base that is lost with the job that was kept."""
    start = max(job.start.validation_loss for job in recording.jobs if job.start is not None)
    return (result.best_kept - result.best_of_all) / (start - result.best_of_all)


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over the recordings; and by how much the default keeps a worse loss than the paper's rule, where most."""
    found: dict[str, float] = {}
    for policy in POLICIES:
        own = [one for one in rows if one["policy"] == policy]
        key = policy.replace(", ", "_").replace(" ", "_")
        found[f"saved_{key}"] = statistics.fmean(one["samples_saved"] for one in own)
        found[f"lost_{key}"] = statistics.fmean(one["improvement_lost"] for one in own)
    regret = {(one["recording"], one["policy"]): one["regret"] for one in rows}
    names = {one["recording"] for one in rows}
    found["worse_than_paper"] = max(regret[name, "default"] - regret[name, "paper"] for name in names)
    return found


def gate(name: str, recording: Recording) -> list[str]:
    """What is wrong with a recording or its replay; empty when a policy that ends no job trains every sample and finds
    the lowest recorded loss, and the value of the base is known of every job."""
    result = run(recording, EarlyExit(enabled=False))
    losses = [loss for job in recording.jobs for _, loss in job.evaluations if math.isfinite(loss)]
    failures = []
    if result.samples_saved != 0 or result.best_kept != min(losses):
        failures.append(f"{name}: expected {min(losses)} kept and nothing saved, found {result.best_kept}")
    if any(job.start is None for job in recording.jobs):
        failures.append(f"{name}: expected the base's validation loss of every job, found jobs without; record it anew")
    return failures


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=("smoke", "cpu"), required=True)
    parser.add_argument("--output", type=Path, default=RESULTS_DIR)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
