"""Computes the training step that ``benchmarks/kernels`` measures, on an H200: bytes, FLOPs, programs and predicted
times.

    python -m tools.kernel_model

Nothing is measured here. The gate compares every launch of the model with the launch that the Triton backend makes for
the same group, and bytes and FLOPs with the floors by which ``benchmarks/kernels`` divides measured times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch

from alto.kernels import LoraOperands, TokenSchedule, triton_backend
from benchmarks.common import Result, option_parser, publish
from benchmarks.kernels.lengths import row_lengths
from benchmarks.kernels.ops import OpCase, op_work
from benchmarks.kernels.plans import PLANS, ModelPlan
from benchmarks.kernels.shapes import SHAPES
from benchmarks.kernels.workload import Workload, random_rows
from tools import RESULTS_DIR
from tools.kernel_model.roofline import H200, VERSIONS, StepModel, Version, llama_groups

GOALS = {"predicted_step_over_floor_1b": ("<=", 1.08), "predicted_step_over_floor_8b": ("<=", 1.08)}
BATCH_SIZES = {"1b": (1, 2, 4), "8b": (1, 4)}
SUFFIXES = {"before": "_before", "now": ""}
"""Suffix of a figure's name, by version of the kernels."""
OF_FIGURE = 1
"""Batch size of the figures."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = option_parser(__doc__, ("model",), out=RESULTS_DIR).parse_args(arguments)
    rows: list[dict[str, Any]] = []
    figures: dict[str, float] = {}
    failures: list[str] = []
    for plan in PLANS["gpu"].models:
        for batch_size in BATCH_SIZES[plan.shape]:
            for when, version in VERSIONS.items():
                model = step_model(plan, batch_size, version)
                rows.append(step_row(plan.shape, batch_size, when, model))
                if batch_size == OF_FIGURE:
                    name = f"predicted_step_over_floor_{plan.shape}"
                    figures |= {name + SUFFIXES[when]: model.step_s / model.floor_s} if when in SUFFIXES else {}
                if when == "now" and batch_size == OF_FIGURE:
                    failures += gate_failures(plan.shape, model)
                    kernels = model.kernels(model.passes[0])
                    rows += [{"table": "kernel", "model": plan.shape} | kernel.as_row() for kernel in kernels]
    result = Result.of(
        benchmark="kernels",
        scale="model",
        gate_failures=failures,
        figures=figures,
        goals=GOALS,
        rows=rows,
        notes=[f"Computed for one {H200.name}; not measured."],
    )
    return publish(result, options.out)


def step_model(plan: ModelPlan, batch_size: int, version: Version) -> StepModel:
    """Return the model of the step that ``benchmarks/kernels`` measures with ``plan``."""
    passes, trained, sequences = _passes(plan, batch_size)
    return StepModel(
        chip=H200,
        shape=SHAPES[plan.shape],
        ranks=plan.ranks,
        passes=passes,
        trained=trained,
        sequences=sequences,
        version=version,
    )


@cache
def _passes(
    plan: ModelPlan, batch_size: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return for each pass of a step: the tokens of the jobs, the number of trained tokens, and the lengths of the
    sequences."""
    data = random_rows(row_lengths(plan.tokenizer), SHAPES[plan.shape]["vocab_size"])
    batches = list(Workload(plan.ranks, data, plan.max_tokens_per_pass).batches(batch_size, torch.device("cpu")))
    passes = []
    for batch in batches:
        tokens = dict(zip(batch.slots, batch.job_tokens, strict=True))
        passes.append(tuple(tokens.get(slot, 0) for slot in range(len(plan.ranks))))
    return (
        tuple(passes),
        tuple(sum(batch.job_targets) for batch in batches),
        tuple(tuple(batch.sequence_lengths) for batch in batches),
    )


def step_row(shape: str, batch_size: int, when: str, model: StepModel) -> dict[str, Any]:
    """Return a row with the parts of a step's time."""
    return {
        "table": "step",
        "model": shape,
        "batch_size": batch_size,
        "kernels": when,
        "tokens": sum(map(sum, model.passes)),
        "passes": len(model.passes),
        "frozen_ms": model.frozen_s * 1e3,
        "floor_ms": model.floor_s * 1e3,
        "step_ms": model.step_s * 1e3,
        "floor_over_frozen": model.floor_s / model.frozen_s,
        "step_over_frozen": model.step_s / model.frozen_s,
        "step_over_floor": model.step_s / model.floor_s,
    }


def gate_failures(shape: str, model: StepModel) -> list[str]:
    """Return a sentence for every launch, byte count or FLOP count of the model that differs from the backend or the
    floors."""
    lengths, failures = model.passes[0], []
    kernels = model.kernels(lengths)
    modelled = [(kernel.kernel, kernel.grid) for kernel in kernels]
    launched = [
        launch
        for group in llama_groups(model.shape)
        for launch in _launches(group.in_features, group.out_features, model.ranks, lengths)
    ]
    if modelled != launched:
        failures.append(f"{shape}: expected the launches {launched}, found {modelled} in the model")
    for index, group in enumerate(llama_groups(model.shape)):
        case = OpCase(
            in_features=group.in_features, out_features=group.out_features, lengths=lengths, ranks=model.ranks
        )
        of_group = {kernel.kernel: kernel for kernel in kernels[5 * index : 5 * index + 5]}
        work = op_work(case, torch.bfloat16)
        (of_input, flops), (of_weight, more) = work["grouped_backward_input"], work["grouped_backward_weight"]
        dys = torch.bfloat16.itemsize * sum(lengths) * sum(group.out_features)
        work["grouped_backward"] = (of_input + of_weight - dys, flops + more)
        for op, names in {
            "grouped_shrink": ("shrink",),
            "grouped_expand": ("expand",),
            "grouped_backward": ("dy", "dx", "da"),
        }.items():
            num_bytes, num_flops = work[op]
            found_bytes = sum(of_group[name].num_bytes for name in names)
            found_flops = sum(of_group[name].num_flops for name in names)
            if found_bytes < num_bytes or abs(found_flops - num_flops) > 1e-9 * num_flops:
                failures.append(
                    f"{shape}, {group.name}, {op}: expected at least {num_bytes:.6g} bytes and {num_flops:.6g} FLOPs, "
                    f"found {found_bytes:.6g} and {found_flops:.6g}"
                )
    return failures


def _launches(
    in_features: int, out_features: tuple[int, ...], ranks: tuple[int, ...], lengths: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Return kernel and grid of every launch of a group, as the backend makes them, forward and backward."""
    members, largest = len(out_features), max(ranks)
    size = (in_features * members + sum(out_features)) * largest
    # Adapters are neither read nor written, so all of them may use the same memory.
    params_ZP = torch.zeros(1, size).expand(len(ranks), -1)
    operands = LoraOperands(
        number=0,
        in_features=in_features,
        out_features=out_features,
        params_ZP=params_ZP,
        grads_ZP=params_ZP,
        max_rank=largest,
    )
    for slot, rank in enumerate(ranks):
        starts = [(in_features * members + sum(out_features[:member])) * rank for member in range(members)]
        operands.assign(slot, [rank] * members, 0, starts)
    schedule = TokenSchedule.build(range(len(ranks)), lengths, [2.0] * len(ranks))
    x_TK = torch.empty(1, 1, dtype=torch.bfloat16).expand(schedule.num_tokens, in_features)
    ys = [torch.empty(1, 1, dtype=torch.bfloat16).expand(schedule.num_tokens, width) for width in out_features]
    found: list[tuple[str, tuple[int, int, int]]] = []
    launch = triton_backend.launch
    triton_backend.launch = lambda kernel, grid, *rest, **constants: found.append(  # type: ignore[assignment]
        (kernel.fn.__name__.removesuffix("_kernel"), grid)
    )
    try:
        s_TQ = triton_backend.grouped_shrink(x_TK, operands, schedule)
        triton_backend.grouped_expand(s_TQ, operands, ys, schedule)
        triton_backend.grouped_backward(x_TK, s_TQ, ys, operands, x_TK, schedule)
    finally:
        triton_backend.launch = launch
    yield from found


if __name__ == "__main__":
    raise SystemExit(main())
