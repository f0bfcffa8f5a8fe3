"""One training step of many adapters, done in seven ways; and the grouped ops against what bytes and FLOPs allow.

``frozen`` is the base alone, forward and backward of activations: the floor. ``sequential`` is PEFT, one job at a time;
``loop`` a few GEMMs for each adapter in each layer (mLoRA's way), ``wide`` one GEMM over the ranks of all adapters
(LoRAFusion's way), ``grouped_mm`` PyTorch's grouped GEMM, ``ours`` ALTO's trainer on the backend that it chooses,
``compiled`` the same with compiled layers. All have the same weights and tokens and take turns in one process; nothing
of a model is timed before its gate is passed.

    python benchmarks/kernels.py --scale gpu
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import RESULTS_DIR, Result, format_table, publish

from kernels_lib.gate import TOLERANCES
from kernels_lib.plans import PLANS, Plan
from kernels_lib.stages import CUT_LAYERS, measure

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    plan = PLANS[options.scale]
    if plan.device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            f"--scale {options.scale}: expected an NVIDIA GPU, found none that torch {torch.__version__} can use; run "
            "it where torch.cuda.is_available() is true, or choose --scale cpu"
        )
    torch.set_num_threads(options.threads)
    findings = measure(plan)
    print_rows(findings.rows)
    result = Result.of(
        benchmark="kernels",
        scale=options.scale,
        gate_failures=findings.failures,
        figures=findings.figures,
        goals=plan.goals,
        rows=findings.rows,
        notes=[*findings.notes, *notes(plan)],
    )
    return publish(result, options.output)


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """One table for each kind of row."""
    for table in dict.fromkeys(row["table"] for row in rows):
        chosen = [row for row in rows if row["table"] == table]
        columns = list(dict.fromkeys(key for row in chosen for key in row if key != "table"))
        print(f"{table}\n{format_table(columns, ([row.get(column, '') for column in columns] for row in chosen))}\n")


def notes(plan: Plan) -> list[str]:
    tolerance = TOLERANCES[plan.dtype]
    models = (
        f"{model.shape}: {len(model.ranks)} jobs of ranks {', '.join(map(str, sorted(set(model.ranks))))}, GSM8K row "
        f"lengths under {model.tokenizer}'s tokenizer, passes of {model.max_tokens_per_pass} tokens."
        for model in plan.models
    )
    return [
        *models,
        f"Base in {str(plan.dtype).removeprefix('torch.')}, random weights and tokens. Gate: losses within "
        f"{tolerance.loss:g} and every job's gradients within {tolerance.gradient:g} (relative, in norm) of the "
        f"float64 reference, on {CUT_LAYERS} layers of the model; likewise every op by itself.",
        "step_over_frozen and step_over_floor are the worst over batch sizes, the floor being the frozen step times "
        "(1 + LoRA FLOPs / base FLOPs); op_share_of_floor is the worst over ops and shapes. Ratios are medians over "
        "rounds of the ratio within a round.",
        "In favour of loop, wide and grouped_mm: ALTO's padding-free attention and loss head, adapters and optimizer "
        "state in the base's dtype, gradients written in place. In favour of sequential: logits in trained columns "
        "alone, adapters in the base's dtype, one adapter a rank for all jobs of that rank.",
    ]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=tuple(PLANS), default="smoke")
    parser.add_argument("--output", type=Path, default=RESULTS_DIR)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args(arguments)
