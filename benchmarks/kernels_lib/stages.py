"""The stages of a run: gate and time of a layer, the ops one by one, whole steps, samples per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from common import Spread, spread
from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.kernels import choose_backend
from alto.lora import BankLayout, find_shared_inputs, linear_modules
from kernels_lib.flops import base_flops, lora_flops
from kernels_lib.gate import gate_failures
from kernels_lib.lengths import row_lengths
from kernels_lib.measure import count_launches, device_limits, peak_bytes, take_turns
from kernels_lib.ops import OpCase, op_failures, op_rows
from kernels_lib.plans import ModelPlan, Plan, ThroughputPlan
from kernels_lib.shapes import SHAPES, random_model
from kernels_lib.throughput import measure_throughput
from kernels_lib.variants import VARIANTS, Variant, build, usable_variants
from kernels_lib.workload import Workload, random_rows

__all__ = ["CUT_LAYERS", "Findings", "measure"]

CUT_LAYERS = 2
CUT_VOCABULARY = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a run has found so far, in the parts of a ``Result``; every row names its ``table``. Stages add to it."""

    failures: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def measure(plan: Plan) -> Findings:
    """Everything in ``plan``, model by model; ends with the first gate that fails."""
    findings = Findings()
    usable = usable_variants(plan.device, plan.dtype)
    names = [name for name in plan.variants if name in usable]
    if left_out := sorted(set(VARIANTS) - set(usable)):
        findings.notes.append(f"PyTorch cannot do {', '.join(left_out)} in {plan.dtype} here.")
    for number, model in enumerate(plan.models):
        for stage in (_measure_layers, _measure_ops, partial(_measure_whole, speedups=number == 0)):
            stage(plan, model, names, findings)
            if findings.failures:
                return findings
    if plan.throughput is not None:
        _measure_samples(plan, plan.throughput, findings)
    return findings


def _measure_layers(plan: Plan, model: ModelPlan, names: Sequence[str], findings: Findings) -> None:
    """The gate, then forward and backward pass of a layer: of the model cut to two layers and a small vocabulary."""
    vocabulary = min(CUT_VOCABULARY, SHAPES[model.shape]["vocab_size"])
    base, workload = _prepare(plan, model, num_hidden_layers=CUT_LAYERS, vocab_size=vocabulary)
    variants = {name: build(name, base, workload) for name in names}
    findings.failures.extend(gate_failures(variants, base, workload, model.batch_sizes[0]))
    if findings.failures:
        return
    for batch_size in model.batch_sizes:
        actions = {name: partial(variant.backward, batch_size) for name, variant in variants.items()}
        for name, seconds in take_turns(actions, plan.repeats, plan.device).seconds.items():
            row = {"table": "layer", "model": model.shape, "batch_size": batch_size, "variant": name}
            row |= _milliseconds([duration_s / CUT_LAYERS for duration_s in seconds])
            if plan.device.type == "cuda":
                row["launches"] = count_launches(actions[name]) / CUT_LAYERS
                row["passes"] = workload.passes(batch_size) if name != "sequential" else len(workload.ranks)
            findings.rows.append(row)


def _measure_ops(plan: Plan, model: ModelPlan, names: Sequence[str], findings: Findings) -> None:
    """The ops of the chosen backend on every group of modules of the model that read the same input, on one pass of the
    smallest and the largest batch."""
    ops = choose_backend(device=plan.device)
    base, workload = _prepare(plan, model, num_hidden_layers=1, vocab_size=64)
    shared_inputs = find_shared_inputs(base, Backbone(base, None, "random").run_once)
    layout = BankLayout(modules=linear_modules(base), max_rank=max(workload.ranks), shared_inputs=shared_inputs)
    limits = device_limits(plan.device, plan.dtype)
    findings.notes.append(
        f"{model.shape}: op floors at {limits.bytes_per_s / 1e9:.0f} GB/s and {limits.flops_per_s / 1e12:.3g} TFLOP/s, "
        "measured in a large copy and a large GEMM."
    )
    for batch_size in dict.fromkeys((model.batch_sizes[0], model.batch_sizes[-1])):
        batch = next(workload.batches(batch_size, plan.device))
        ranks = tuple(workload.ranks[slot] for slot in batch.slots)
        for group in layout.groups:
            case = OpCase(
                in_features=group[0].in_features,
                out_features=tuple(module.out_features for module in group),
                lengths=batch.job_tokens,
                ranks=ranks,
            )
            findings.failures.extend(op_failures(case, ops, plan.device, plan.dtype))
            if findings.failures:
                return
            for row in op_rows(case, ops, plan.device, plan.dtype, limits):
                findings.rows.append({"table": "op", "model": model.shape, "batch_size": batch_size, **row})
    findings.figures[f"op_share_of_floor_{model.shape}"] = min(
        row["share_of_floor"] for row in findings.rows if row["table"] == "op" and row["model"] == model.shape
    )


def _measure_whole(plan: Plan, model: ModelPlan, names: Sequence[str], findings: Findings, *, speedups: bool) -> None:
    """Whole training steps of the whole model; with ``speedups``, those of ours become figures."""
    base, workload = _prepare(plan, model)
    variants = _build_what_fits([name for name in names if name in model.whole], base, workload, findings, model)
    over_frozen, over_floor = [], []
    for batch_size in model.batch_sizes:
        actions = {name: partial(variant.step, batch_size) for name, variant in variants.items()}
        turns = take_turns(actions, plan.repeats, plan.device)
        for name in turns.out_of_memory:
            findings.notes.append(f"{model.shape}, batch size {batch_size}: {name} ran out of memory.")
        for name, seconds in turns.seconds.items():
            row = {"table": "step", "model": model.shape, "batch_size": batch_size, "variant": name}
            row |= _milliseconds(seconds)
            for other in ("frozen", "ours"):
                if other in turns.seconds:
                    row |= _with_extremes(f"over_{other}", turns.ratio(name, other))
            if plan.device.type == "cuda":
                row["peak_bytes"] = peak_bytes(actions[name], plan.device)
            findings.rows.append(row)
            if speedups and name in ("loop", "sequential") and "ours" in turns.seconds:
                findings.figures[f"{name}_bs{batch_size}"] = row["over_ours"]
        if {"frozen", "ours"} <= set(turns.seconds):
            lora_share = lora_flops(base, workload, batch_size) / base_flops(base, workload, batch_size)
            over_frozen.append(turns.ratio("ours", "frozen").median)
            over_floor.append(over_frozen[-1] / (1 + lora_share))
    if len(over_frozen) == len(model.batch_sizes):
        findings.figures[f"step_over_frozen_{model.shape}"] = max(over_frozen)
        findings.figures[f"step_over_floor_{model.shape}"] = max(over_floor)


def _measure_samples(plan: Plan, throughput: ThroughputPlan, findings: Findings) -> None:
    shape = SHAPES[throughput.shape]
    lengths = [row for row in row_lengths("alto-tiny") if row.total <= throughput.longest][: throughput.num_rows]
    workload = Workload(
        ranks=throughput.ranks, data=random_rows(lengths, shape["vocab_size"]), max_tokens_per_pass=4096
    )
    found = measure_throughput(random_model(shape, device=plan.device, dtype=plan.dtype), workload, plan.repeats)
    findings.failures.extend(found.failures)
    for name, value in (
        ("samples_per_s_over_peft", found.alto_over_peft),
        ("samples_per_s", found.alto),
        ("peft_samples_per_s", found.peft),
    ):
        findings.figures[name] = value.median
        row = {"table": "throughput", "model": throughput.shape, "figure": name}
        findings.rows.append(row | _with_extremes("median", value))


def _prepare(plan: Plan, model: ModelPlan, **cut: int) -> tuple[PreTrainedModel, Workload]:
    """The model with random weights, with keys of its configuration replaced by those of ``cut``, and its jobs."""
    shape = {**SHAPES[model.shape], **cut}
    workload = Workload(
        ranks=model.ranks,
        data=random_rows(row_lengths(model.tokenizer), shape["vocab_size"]),
        max_tokens_per_pass=model.max_tokens_per_pass,
    )
    return random_model(shape, device=plan.device, dtype=plan.dtype), workload


def _build_what_fits(
    names: Sequence[str], base: PreTrainedModel, workload: Workload, findings: Findings, model: ModelPlan
) -> dict[str, Variant]:
    variants = {}
    for name in names:
        try:
            variants[name] = build(name, base, workload)
        except torch.OutOfMemoryError:
            findings.notes.append(f"{model.shape}: {name} ran out of memory before its first step.")
    return variants


def _milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    return _with_extremes("ms", spread(1e3 * duration_s for duration_s in seconds))


def _with_extremes(name: str, value: Spread) -> dict[str, float]:
    """A median and its extremes as columns."""
    stem = "" if name == "median" else f"{name}_"
    return {name: value.median, f"{stem}min": value.minimum, f"{stem}max": value.maximum}
