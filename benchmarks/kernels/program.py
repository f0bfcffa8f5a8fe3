"""Measures one training step of many adapters, done in seven ways; and compares the grouped ops with the limits of
bytes and FLOPs.

``frozen`` is the base alone, forward and backward of activations: the floor. ``sequential`` is PEFT, one job at a time.
``loop`` uses a few GEMMs for each adapter in each layer (as in mLoRA), ``lorafusion`` uses LoRAFusion's kernels, which
include the frozen GEMM, and ``grouped_mm`` uses PyTorch's grouped GEMM. ``ours`` is ALTO's trainer on the backend that
it chooses, and ``compiled`` the same with compiled layers. All have the same weights and tokens and take turns in one
process. No part of a model is timed before its gate has passed.

    python -m benchmarks.paper kernels --scale gpu
    python -m benchmarks.paper kernels --scale gpu --models 8b --stages steps --out results   # a piece of it

If something fails, this is recorded, the rest continues, and the exit code is 1. Every piece is on disk as soon as it
is measured. The pieces of several commands make one result, see ``pieces.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.kernels.gate import tolerance_of
from benchmarks.kernels.plans import PLANS, Plan
from benchmarks.kernels.shapes import SHAPES
from benchmarks.kernels.stages import CUT_LAYERS, STAGES, actions
from benchmarks.pieces import Study, piece_options, run_chosen

__all__ = ["main", "study"]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    return run_chosen(study(options.scale), actions(PLANS[options.scale]), options)


def study(scale: str) -> Study:
    """Return the study of ``scale``: all pieces, and their notes."""
    plan = PLANS[scale]
    names = list(actions(plan))
    return Study(benchmark="kernels", scale=scale, pieces=tuple(names), goals=plan.goals, notes=tuple(notes(plan)))


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
    models = {scale: [model.shape for model in plan.models] for scale, plan in PLANS.items()}
    return piece_options(__doc__, models, STAGES, arguments)
