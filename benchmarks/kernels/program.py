"""One training step of many adapters, done in seven ways; and the grouped ops against what bytes and FLOPs allow.

``frozen`` is the base alone, forward and backward of activations: the floor. ``sequential`` is PEFT, one job at a time;
``loop`` a few GEMMs for each adapter in each layer (mLoRA's way), ``lorafusion`` LoRAFusion's kernels, which the frozen
GEMM is part of, ``grouped_mm`` PyTorch's grouped GEMM, ``ours`` ALTO's trainer on the backend that it chooses,
``compiled`` the same with compiled layers. All have the same weights and tokens and take turns in one process; nothing
of a model is timed before its gate is passed.

    python -m benchmarks.paper kernels --scale gpu
    python -m benchmarks.paper kernels --scale gpu --models 8b --stages steps --out results   # a piece of it

What fails is recorded, the rest goes on, and the exit code is 1; every piece is on disk as soon as it is measured. The
pieces of several commands make one result, see ``pieces.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.common import format_table, option_parser
from benchmarks.kernels.gate import tolerance_of
from benchmarks.kernels.plans import PLANS, Plan
from benchmarks.kernels.shapes import SHAPES
from benchmarks.kernels.stages import CUT_LAYERS, STAGES, actions
from benchmarks.pieces import Study, parse_pieces, read_pieces, run_pieces

__all__ = ["main", "study"]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    plan = PLANS[options.scale]
    if plan.device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            f"--scale {options.scale}: expected an NVIDIA GPU, found none that torch {torch.__version__} can use; run "
            "it where torch.cuda.is_available() is true, or choose --scale cpu"
        )
    torch.set_num_threads(options.threads)
    chosen = {
        name: action
        for name, action in actions(plan).items()
        if name.split()[0] in options.models and name.split()[1] in options.stages
    }
    whole = study(options.scale)
    code = run_pieces(whole, chosen, options.out)
    print_rows([row for piece in read_pieces(whole, options.out) if piece.name in chosen for row in piece.rows])
    return code


def study(scale: str) -> Study:
    """What is measured at ``scale``: all pieces, and what is said of them."""
    plan = PLANS[scale]
    names = list(actions(plan))
    return Study(benchmark="kernels", scale=scale, pieces=tuple(names), goals=plan.goals, notes=tuple(notes(plan)))


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """One table for each kind of row."""
    for table in dict.fromkeys(row["table"] for row in rows):
        chosen = [row for row in rows if row["table"] == table]
        columns = list(dict.fromkeys(key for row in chosen for key in row if key != "table"))
        print(f"{table}\n{format_table(columns, ([row.get(column, '') for column in columns] for row in chosen))}\n")


def notes(plan: Plan) -> list[str]:
    models = (
        f"{model.shape}: {len(model.ranks)} jobs of ranks {', '.join(map(str, sorted(set(model.ranks))))}, GSM8K row "
        f"lengths under {model.tokenizer}'s tokenizer, passes of {model.max_tokens_per_pass} tokens."
        for model in plan.models
    )
    tolerances = {model.shape: tolerance_of(plan.dtype, SHAPES[model.shape]["hidden_size"]) for model in plan.models}
    gates = "; ".join(
        f"{shape}: losses within {tolerance.loss:.2g}, every job's gradients within {tolerance.gradient:g} in norm"
        for shape, tolerance in tolerances.items()
    )
    return [
        *models,
        f"Base in {str(plan.dtype).removeprefix('torch.')}, random weights and tokens. Gate, on {CUT_LAYERS} layers of "
        f"the model, relative to the float64 reference: {gates}; likewise every op by itself.",
        "step_over_frozen and step_over_floor are the worst over batch sizes, the floor being the frozen step times "
        "(1 + LoRA FLOPs / base FLOPs); op_share_of_floor is the worst over ops and shapes. A baseline without a batch "
        "size is the median over batch sizes. Ratios are medians over rounds of the ratio within a round.",
        "In favour of loop, lorafusion and grouped_mm: ALTO's padding-free attention and loss head, adapters and "
        "optimizer state in the base's dtype, gradients written in place. In favour of sequential: logits in trained "
        "columns alone, adapters in the base's dtype, one adapter a rank for all jobs of that rank.",
    ]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = option_parser(__doc__, PLANS, threads=True)
    models = {scale: [model.shape for model in plan.models] for scale, plan in PLANS.items()}
    return parse_pieces(parser, arguments, models, STAGES)
