"""The stages of a run: gate and time of a layer, the ops one by one, whole steps, samples per second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TypeVar

from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.kernels import choose_backend
from alto.lora import BankLayout, find_shared_inputs, linear_modules
from benchmarks.common import Spread, spread
from benchmarks.kernels.flops import base_flops, lora_flops
from benchmarks.kernels.gate import Judge
from benchmarks.kernels.lengths import row_lengths
from benchmarks.kernels.measure import count_launches, device_limits, peak_bytes, take_turns
from benchmarks.kernels.ops import OpCase, op_failures, op_rows
from benchmarks.kernels.plans import ModelPlan, Plan, ThroughputPlan
from benchmarks.kernels.shapes import SHAPES, random_model
from benchmarks.kernels.throughput import measure_throughput
from benchmarks.kernels.variants import VARIANTS, Variant, build, usable_variants
from benchmarks.kernels.workload import Workload, random_rows
from benchmarks.pieces import Action, Flush, GateFailedError, Piece, describe_error, piece_name

__all__ = ["CUT_LAYERS", "SPEEDUPS", "STAGES", "actions", "with_extremes"]

CUT_LAYERS = 2
CUT_VOCABULARY = 2048

STAGES = ("layers", "ops", "throughput", "steps")
"""Stages in the order in which they are measured; whole steps take longest."""

SPEEDUPS = ("sequential", "loop", "lorafusion")
"""Variants whose step times divided by ours are figures: at every batch size, and the median of these."""

_Found = TypeVar("_Found")


def actions(plan: Plan) -> dict[str, Action]:
    """Return the function that measures each piece of ``plan``, slowest last. No part of a model is timed before its
    gate."""
    gates = _Gates(plan)
    found: dict[str, Action] = {}
    for stage in STAGES:
        if stage == "throughput":
            if plan.throughput is not None:
                found[piece_name(plan.throughput.shape, stage)] = partial(_measure_samples, plan, plan.throughput)
            continue
        for number, model in enumerate(plan.models):
            measure: dict[str, Action] = {
                "layers": partial(_measure_layers, plan, model, gates),
                "ops": partial(_measure_ops, plan, model),
                "steps": partial(_measure_steps, plan, model, gates, number == 0),
            }
            found[piece_name(model.shape, stage)] = measure[stage]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """The variants of a model that may be timed, and why the others may not: they are wrong, or failed."""

    green: tuple[str, ...]
    failures: tuple[str, ...]
    errors: tuple[str, ...]


class _Gates:
    """The gate of every model, on the model cut to two layers and a small vocabulary; it runs once per model."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._verdicts: dict[str, _Verdict] = {}

    def green(self, model: ModelPlan, piece: Piece) -> tuple[str, ...]:
        """Return the variants that agree with the reference; write the faults of the others into ``piece``."""
        usable = usable_variants(self._plan.device, self._plan.dtype)
        if left_out := sorted(set(VARIANTS) - set(usable)):
            piece.notes.append(f"PyTorch cannot do {', '.join(left_out)} in {self._plan.dtype} here.")
        if model.shape not in self._verdicts:
            names = [name for name in self._plan.variants if name in usable]
            self._verdicts[model.shape] = self._verdict(model, names)
        verdict = self._verdicts[model.shape]
        piece.failures.extend(verdict.failures)
        piece.errors.extend(verdict.errors)
        return verdict.green

    def _verdict(self, model: ModelPlan, names: Sequence[str]) -> _Verdict:
        base, workload = _prepare_cut(self._plan, model)
        judge = Judge(base, workload, model.batch_sizes[0])
        green, failures, errors = [], [], []
        for name in names:
            try:
                wrong = judge.failures(name, build(name, base, workload))
            except Exception as error:
                errors.append(f"{model.shape}, gate: {name}: {describe_error(error)}")
                continue
            failures += [f"{model.shape}, {sentence}" for sentence in wrong]
            if not wrong:
                green.append(name)
        return _Verdict(green=tuple(green), failures=tuple(failures), errors=tuple(errors))


def _measure_layers(plan: Plan, model: ModelPlan, gates: _Gates, piece: Piece, flush: Flush) -> None:
    """Measure forward and backward pass of a layer, on the model cut to two layers and a small vocabulary."""
    names = gates.green(model, piece)
    base, workload = _prepare_cut(plan, model)
    variants = _build(names, base, workload, piece)
    for batch_size in model.batch_sizes:
        steps = {name: partial(variant.backward, batch_size) for name, variant in variants.items()}
        turns = take_turns(steps, plan.repeats, plan.device)
        _record_failed(piece, batch_size, turns.failed)
        for name, seconds in turns.seconds.items():
            row = {"table": "layer", "model": model.shape, "batch_size": batch_size, "variant": name}
            row |= _milliseconds([duration_s / CUT_LAYERS for duration_s in seconds])
            if plan.device.type == "cuda":
                launches = _attempt(piece, batch_size, name, lambda step=steps[name]: count_launches(step))
                if launches is not None:
                    row["launches"] = launches / CUT_LAYERS
                row["passes"] = workload.micro_batches(batch_size) if name != "sequential" else len(workload.ranks)
            piece.rows.append(row)
        flush()


def _measure_ops(plan: Plan, model: ModelPlan, piece: Piece, flush: Flush) -> None:
    """Measure the ops of the chosen backend on every group of modules of the model that read the same input, on one
    pass of the smallest and of the largest batch. If one op is wrong, no op is timed at that shape, and there is no
    figure."""
    ops = choose_backend(device=plan.device)
    base, workload = _prepare(plan, model, num_hidden_layers=1, vocab_size=64)
    shared_inputs = find_shared_inputs(base, Backbone(base, None, "random").run_once)
    layout = BankLayout(modules=linear_modules(base), max_rank=max(workload.ranks), shared_inputs=shared_inputs)
    limits = device_limits(plan.device, plan.dtype)
    piece.notes.append(
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
            try:
                wrong = op_failures(case, ops, plan.device, plan.dtype)
                timed = [] if wrong else list(op_rows(case, ops, plan.device, plan.dtype, limits))
            except Exception as error:
                piece.errors.append(
                    f"{model.shape}, batch size {batch_size}: ops at {case.shape}: {describe_error(error)}"
                )
                continue
            piece.failures.extend(f"{model.shape}, batch size {batch_size}: {sentence}" for sentence in wrong)
            piece.rows += [{"table": "op", "model": model.shape, "batch_size": batch_size, **row} for row in timed]
            flush()
    ways = sorted({row["timed_by"] for row in piece.rows})
    piece.notes.append(f"{model.shape}: ops timed by {' and '.join(ways) if ways else 'nothing'}.")
    if not piece.failures and not piece.errors:
        piece.figures[f"op_share_of_floor_{model.shape}"] = min(row["share_of_floor"] for row in piece.rows)


def _measure_steps(plan: Plan, model: ModelPlan, gates: _Gates, speedups: bool, piece: Piece, flush: Flush) -> None:
    """Measure whole training steps of the whole model; with ``speedups``, those of ``SPEEDUPS`` divided by ours become
    figures."""
    names = gates.green(model, piece)
    base, workload = _prepare(plan, model)
    variants = _build([name for name in names if name in model.whole], base, workload, piece)
    over_frozen, over_floor = [], []
    over_ours: dict[str, list[float]] = {name: [] for name in SPEEDUPS}
    for batch_size in model.batch_sizes:
        steps = {name: partial(variant.step, batch_size) for name, variant in variants.items()}
        turns = take_turns(steps, plan.repeats, plan.device)
        _record_failed(piece, batch_size, turns.failed)
        for name, seconds in turns.seconds.items():
            row = {"table": "step", "model": model.shape, "batch_size": batch_size, "variant": name}
            row |= _milliseconds(seconds)
            for other in ("frozen", "ours"):
                if other in turns.seconds:
                    row |= with_extremes(f"over_{other}", turns.ratio(name, other))
            if plan.device.type == "cuda":
                peak = _attempt(piece, batch_size, name, lambda step=steps[name]: peak_bytes(step, plan.device))
                if peak is not None:
                    row["peak_bytes"] = peak
            piece.rows.append(row)
            if speedups and name in SPEEDUPS and "ours" in turns.seconds:
                piece.figures[f"{name}_bs{batch_size}"] = row["over_ours"]
                over_ours[name].append(row["over_ours"])
        if {"frozen", "ours"} <= set(turns.seconds):
            lora_share = lora_flops(base, workload, batch_size) / base_flops(base, workload, batch_size)
            over_frozen.append(turns.ratio("ours", "frozen").median)
            over_floor.append(over_frozen[-1] / (1 + lora_share))
        flush()
    if len(over_frozen) == len(model.batch_sizes):
        piece.figures[f"step_over_frozen_{model.shape}"] = max(over_frozen)
        piece.figures[f"step_over_floor_{model.shape}"] = max(over_floor)
    for name, ratios in over_ours.items():
        if len(ratios) == len(model.batch_sizes):
            piece.figures[name] = median(ratios)


def _measure_samples(plan: Plan, throughput: ThroughputPlan, piece: Piece, flush: Flush) -> None:
    shape = SHAPES[throughput.shape]
    lengths = [row for row in row_lengths("alto-tiny") if row.total <= throughput.longest][: throughput.num_rows]
    workload = Workload(
        ranks=throughput.ranks, data=random_rows(lengths, shape["vocab_size"]), max_tokens_per_pass=4096
    )
    found = measure_throughput(random_model(shape, device=plan.device, dtype=plan.dtype), workload, plan.repeats)
    if found.failures:
        raise GateFailedError(found.failures)
    for name, value in (
        ("samples_per_s_over_peft", found.alto_over_peft),
        ("samples_per_s", found.alto),
        ("peft_samples_per_s", found.peft),
    ):
        piece.figures[name] = value.median
        row = {"table": "throughput", "model": throughput.shape, "figure": name}
        piece.rows.append(row | with_extremes("median", value))


def _prepare_cut(plan: Plan, model: ModelPlan) -> tuple[PreTrainedModel, Workload]:
    """Return the model cut to two layers and a small vocabulary, and its jobs."""
    vocabulary = min(CUT_VOCABULARY, SHAPES[model.shape]["vocab_size"])
    return _prepare(plan, model, num_hidden_layers=CUT_LAYERS, vocab_size=vocabulary)


def _prepare(plan: Plan, model: ModelPlan, **cut: int) -> tuple[PreTrainedModel, Workload]:
    """Return the model with random weights, with keys of its configuration replaced by those of ``cut``, and its
    jobs."""
    shape = {**SHAPES[model.shape], **cut}
    workload = Workload(
        ranks=model.ranks,
        data=random_rows(row_lengths(model.tokenizer), shape["vocab_size"]),
        max_tokens_per_pass=model.max_tokens_per_pass,
    )
    return random_model(shape, device=plan.device, dtype=plan.dtype), workload


def _build(names: Sequence[str], base: PreTrainedModel, workload: Workload, piece: Piece) -> dict[str, Variant]:
    """Return the variants that can be built; write the reasons for the others into ``piece``."""
    variants = {}
    for name in names:
        try:
            variants[name] = build(name, base, workload)
        except Exception as error:
            piece.errors.append(f"{piece.name}: {name}, before its first step: {describe_error(error)}")
    return variants


def _record_failed(piece: Piece, batch_size: int, failed: Mapping[str, str]) -> None:
    for name, reason in failed.items():
        piece.errors.append(f"{piece.name}, batch size {batch_size}: {name}: {reason}")


def _attempt(piece: Piece, batch_size: int, name: str, action: Callable[[], _Found]) -> _Found | None:
    """Return the result of ``action``; None if it fails, which is written into ``piece``."""
    try:
        return action()
    except Exception as error:
        _record_failed(piece, batch_size, {name: describe_error(error)})
        return None


def _milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    return with_extremes("ms", spread(1e3 * duration_s for duration_s in seconds))


def with_extremes(name: str, value: Spread) -> dict[str, float]:
    """Return a median and its extremes as columns."""
    stem = "" if name == "median" else f"{name}_"
    return {name: value.median, f"{stem}min": value.minimum, f"{stem}max": value.maximum}
