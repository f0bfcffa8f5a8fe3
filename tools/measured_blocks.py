"""Paragraphs with measured figures in hand-written pages, made from the result files and placed between two marks."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

__all__ = ["BLOCKS", "with_blocks"]

_SYSTEMS = {
    "sequential": "TRL and PEFT, one job at a time",
    "loop": "many jobs together as mLoRA does",
    "lorafusion": "many jobs together with LoRAFusion's kernels",
    "ray_asha": "Ray Tune with ASHA, around PEFT",
    "optuna_hyperband": "Optuna with Hyperband, around PEFT",
    "optuna_median": "Optuna with its median pruner, around PEFT",
    "batched": "ALTO, every job to its end",
    "early_exit": "**ALTO**",
}
_REAL_SYSTEMS = {
    "TRL and PEFT, one job at a time": "{}_over_trl",
    "Ray Tune with ASHA, around PEFT": "over_ray_asha",
    "Optuna with Hyperband, around PEFT": "over_optuna_hyperband",
}
"""Figures of the peers, with the sweep's name in place of the braces; the others are of the first sweep."""
_REAL_SWEEPS = {
    "sweep12": "12 configurations, 64 rows of GSM8K, 2 epochs",
    "sweep24": "24 configurations, 256 rows",
    "dpo": "DPO, 8 configurations, 128 pairs, 2 epochs",
}
_POLICIES = ("default", "cautious", "greedy", "paper")


def with_blocks(page: str, results: Path) -> str:
    """Return ``page`` with the text between ``<!-- measured: NAME -->`` and ``<!-- end -->`` made anew.

    Raises:
        KeyError: A name is not in ``BLOCKS``.
    """

    def block(found: re.Match[str]) -> str:
        text = BLOCKS[found[1]](results)
        return f"<!-- measured: {found[1]} -->\n{text}\n<!-- end -->"

    return re.sub(r"<!-- measured: (\S+) -->\n.*?<!-- end -->", block, page, flags=re.DOTALL)


def _end_to_end(results: Path) -> str:
    rows = _read(results, "end_to_end")["rows"]
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    found = {(row["system"], row["dataset"]): row for row in rows}
    lines = [
        f"| | {' | '.join(datasets)} | time relative to ALTO | test loss relative to ALTO |",
        "|---" * (len(datasets) + 3) + "|",
    ]
    for system, name in _SYSTEMS.items():
        own = [found[system, dataset] for dataset in datasets if (system, dataset) in found]
        if not own:
            continue
        ours = [found["early_exit", dataset] for dataset in datasets]
        seconds = [f"{row['duration_s']:.0f} s" for row in own]
        times = statistics.median(row["duration_s"] / our["duration_s"] for row, our in zip(own, ours, strict=True))
        pairs = [(row["test_loss"], our["test_loss"]) for row, our in zip(own, ours, strict=True)]
        losses = [theirs / mine for theirs, mine in pairs if theirs is not None]
        loss = f"{statistics.median(losses):.3f}" if losses else "–"
        lines.append(f"| {name} | {' | '.join(seconds)} | {times:.1f} | {loss} |")
    return "\n".join(lines)


def _headline(results: Path) -> str:
    figures = _read(results, "real")["figures"]
    alto = figures["sweep12_s"] / 60
    trl, asha = (alto * figures[name] for name in ("sweep12_over_trl", "over_ray_asha"))
    return (
        f"A sweep of 12 configurations of SmolLM2-135M on two CPU cores takes **{alto:.0f} minutes; TRL and PEFT need "
        f"{trl:.0f}**, one job at a time, and {asha:.0f} with Ray Tune's ASHA ([measured](#measured); "
        "the time of TRL and PEFT is extrapolated from two of the 12 jobs)."
    )


def _real(results: Path) -> str:
    figures = _read(results, "real")["figures"]
    lines = [f"| | {' | '.join(_REAL_SWEEPS.values())} |", "|---" * (len(_REAL_SWEEPS) + 1) + "|"]
    for system, figure in _REAL_SYSTEMS.items():
        names = [figure.format(sweep) if "{}" in figure or sweep == "sweep12" else "" for sweep in _REAL_SWEEPS]
        minutes = [
            f"{figures[f'{sweep}_s'] * figures[name] / 60:.0f} min" if name in figures else "–"
            for sweep, name in zip(_REAL_SWEEPS, names, strict=True)
        ]
        lines.append(f"| {system} | {' | '.join(minutes)} |")
    own = [f"{figures[f'{sweep}_s'] / 60:.0f} min" for sweep in _REAL_SWEEPS]
    lines.append(f"| **ALTO** | {' | '.join(own)} |")
    ray, optuna = (f"{figures[f'test_loss_{figure}']:.3f}" for figure in list(_REAL_SYSTEMS.values())[1:])
    losses = (
        f"In the first sweep, the test loss of ALTO's adapter is {figures['best_loss_ratio']:.3f} times that of the "
        f"best of all 12 trained to their ends, {ray} times that of ASHA's, and {optuna} times that of Hyperband's."
    )
    return "\n".join([*lines, "", losses])


def _others(results: Path) -> str:
    dpo, shared, generate = (_read(results, name)["figures"] for name in ("dpo", "shared_prompts", "generate"))
    return (
        "For 40 DPO configurations, TRL's `DPOTrainer`, one job at a time, needs "
        f"{dpo['batched_over_sequential']:.1f} times as long as ALTO without early exit, and "
        f"{dpo['early_exit_over_sequential']:.1f} times as long as ALTO with it. On held-out pairs, the winner prefers "
        f"the chosen reply in {dpo['early_exit_accuracy']:.1%} with early exit, and in {dpo['batched_accuracy']:.1%} "
        "without. A DPO step with "
        f"shared prompts is {shared['shared_over_whole']:.1f} times as fast as without. Generating with eight adapters "
        f"at once is {generate['generation_speedup']:.1f} times as fast as PEFT with one adapter at a time."
    )


def _rewards(results: Path) -> str:
    found = _read(results, "grpo")
    figures, (*_, tuned) = found["figures"], found["rows"]
    minutes = tuned["duration_s"] / 60
    return (
        f"On two CPU cores, 8 configurations of this task take {minutes:.0f} minutes from start to adapter; TRL's "
        f"`GRPOTrainer`, one configuration after the other, needs {minutes * figures['early_exit_over_trl']:.0f} "
        f"(extrapolated from four steps of two of them). Of 256 test prompts, the base model answers "
        f"{tuned['base_reward']:.0%} correctly, and the winner {tuned['reward']:.0%}."
    )


def _policies(results: Path) -> str:
    rows = _read(results, "policies")["rows"]
    lines = [
        "| policy | samples saved, mean (minimum) | winner's loss relative to the full sweep's, mean (maximum) |",
        "|---|---|---|",
    ]
    for policy in _POLICIES:
        own = [row for row in rows if row["policy"] == policy]
        saved = [row["saved"] for row in own]
        regrets = [row["regret"] for row in own if row["regret"] is not None]
        lines.append(
            f"| `{policy}` | {statistics.fmean(saved):.0%} ({min(saved):.0%}) | {statistics.fmean(regrets):.3f} "
            f"({max(regrets):.3f}) |"
        )
    return "\n".join(lines)


BLOCKS = {
    "headline": _headline,
    "real": _real,
    "end-to-end": _end_to_end,
    "others": _others,
    "policies": _policies,
    "rewards": _rewards,
}
"""Functions by the name in the mark; each writes its paragraph from the folder of the result files."""


def _read(results: Path, topic: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((results / f"{topic}-cpu.json").read_text(encoding="utf-8"))
    return found
