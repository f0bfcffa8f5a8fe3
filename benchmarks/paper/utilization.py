"""Measures how much of a device one adapter uses, and how much many adapters on the same frozen base use.

    python -m benchmarks.paper utilization --scale cpu
    python -m benchmarks.paper utilization --scale gpu --models 8b --stages steps --out results   # a piece of it

PEFT and ALTO train one job at a small batch size, and ALTO trains 2 to 32 jobs together. Rank, rows and weights are the
same, and every job trains every row once. ``steps`` measures tokens per second, and the used share of the device's
arithmetic: the FLOPs per second that the model and its adapters need, divided by those of a large GEMM that takes turns
with the steps. ``memory`` measures the peak of the same epoch, each in a process of its own. No part of a model is
measured before its gate has passed: losses and gradients of PEFT, and of ALTO with the fewest and the most adapters,
must equal those of the float64 reference.

The models have real configurations and random weights, and rows of random tokens with lengths distributed like GSM8K's.
If something fails, this is recorded, the rest continues, and the exit code is 1. The pieces of several commands make
one result, see ``pieces.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from benchmarks.common import Spread, spread
from benchmarks.kernels.flops import base_flops, lora_flops
from benchmarks.kernels.gate import Judge
from benchmarks.kernels.lengths import RowLength, row_lengths
from benchmarks.kernels.measure import large_gemm, take_turns
from benchmarks.kernels.shapes import SHAPES, random_model
from benchmarks.kernels.stages import CUT_LAYERS, CUT_VOCABULARY, with_extremes
from benchmarks.kernels.variants import Ours, Sequential
from benchmarks.kernels.workload import Workload, random_rows
from benchmarks.memory.program import in_child
from benchmarks.pieces import (
    Action,
    Flush,
    GateFailedError,
    Piece,
    Study,
    describe_error,
    piece_name,
    piece_options,
    run_chosen,
)

if TYPE_CHECKING:  # machines with a GPU may have no matplotlib
    from matplotlib.axes import Axes

    from benchmarks.paper.curves import Found

__all__ = ["PLANS", "SYSTEMS", "Case", "ModelPlan", "Plan", "draw_utilization", "main", "make_workload", "study"]

STAGES = ("memory", "steps")
PEFT, ALTO = "peft", "alto"
SYSTEMS: Mapping[str, Callable[[PreTrainedModel, Workload], Sequential | Ours]] = {PEFT: Sequential, ALTO: Ours}
CHILD = "benchmarks.paper.utilization_child"

_GEMM = "gemm"
_GEMMS = 10
"""Number of GEMMs in one turn: a single one takes so short a time on a CPU that another process can distort it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Numbers of adapters that are trained together at one batch size, the smallest first."""

    batch_size: int
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """The measurements of one base model.

    Attributes:
        shape: Name in ``SHAPES``, and in the names of figures.
        tokenizer: Tokenizer whose lengths of GSM8K's rows are used.
        cases: Cases of each stage.
        num_rows: Number of rows that every job trains once; batch sizes divide it.
        max_tokens_per_pass: Limit of ALTO's steps.
        rank: Rank of all adapters.
    """

    shape: str
    tokenizer: str
    cases: Mapping[str, tuple[Case, ...]]
    num_rows: int
    max_tokens_per_pass: int
    rank: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of one scale.

    Attributes:
        repeats: Number of timed rounds.
    """

    device: torch.device
    dtype: torch.dtype
    repeats: int
    models: tuple[ModelPlan, ...]


_ALL = (1, 2, 4, 8, 16, 32)
_GPU_CASES = (Case(batch_size=1, numbers=_ALL), Case(batch_size=8, numbers=_ALL))
# The trainers for all numbers of adapters take turns; for 8B, 63 slots of rank 16 and the base take over 80 GB.
_8B_CASES = tuple(Case(batch_size=size, numbers=(1, 2, 8, 32)) for size in (1, 8))

PLANS: Mapping[str, Plan] = {
    "smoke": Plan(
        device=torch.device("cpu"),
        dtype=torch.float32,
        repeats=2,
        models=(
            ModelPlan(
                shape="tiny",
                tokenizer="gpt2",
                cases={
                    "memory": (Case(batch_size=1, numbers=(1, 2)),),
                    "steps": tuple(Case(batch_size=size, numbers=(1, 2)) for size in (1, 2)),
                },
                num_rows=2,
                max_tokens_per_pass=600,
            ),
        ),
    ),
    "cpu": Plan(
        device=torch.device("cpu"),
        dtype=torch.float32,
        repeats=5,
        models=(
            # Memory is measured on a base that is large compared with one row's activations, steps on a fast one.
            ModelPlan(
                shape="25m",
                tokenizer="gpt2",
                cases={"memory": (Case(batch_size=1, numbers=_ALL),)},
                num_rows=2,
                max_tokens_per_pass=4096,
            ),
            ModelPlan(
                shape="tiny",
                tokenizer="alto-tiny",
                cases={"steps": (Case(batch_size=1, numbers=_ALL), Case(batch_size=4, numbers=(1, 2, 4, 8)))},
                num_rows=4,
                max_tokens_per_pass=4096,
            ),
        ),
    ),
    "gpu": Plan(
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        repeats=5,
        models=(
            ModelPlan(
                shape="1b",
                tokenizer="gpt2",
                cases=dict.fromkeys(STAGES, _GPU_CASES),
                num_rows=16,
                max_tokens_per_pass=16384,
            ),
            ModelPlan(
                shape="8b",
                tokenizer="gpt2",
                cases=dict.fromkeys(STAGES, _8B_CASES),
                num_rows=16,
                max_tokens_per_pass=3072,
            ),
        ),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    plan = PLANS[options.scale]
    gate = cache(partial(_gate_failures, options.scale))
    actions = {
        piece_name(model.shape, stage): _action(options.scale, model, stage, options.threads, gate)
        for stage in STAGES
        for model in plan.models
        if stage in model.cases
    }
    return run_chosen(study(options.scale), actions, options)


def study(scale: str) -> Study:
    """Return the study of ``scale``: all pieces, and their notes."""
    plan = PLANS[scale]
    return Study(
        benchmark="utilization",
        scale=scale,
        pieces=tuple(
            piece_name(model.shape, stage) for stage in STAGES for model in plan.models if stage in model.cases
        ),
        goals={},
        notes=(
            *(
                f"{model.shape}: adapters of rank {model.rank}, {model.num_rows} rows of {_described(model)} tokens, "
                f"passes of {model.max_tokens_per_pass} tokens."
                for model in plan.models
            ),
            f"Base in {str(plan.dtype).removeprefix('torch.')}. device_use is the share of the FLOP/s of a large GEMM, "
            "by PEFT with one adapter, and by ALTO with the fewest and the most, whose quotient is device_use_ratio; "
            "medians over rounds of the ratio within a round. memory_per_adapter_ratio is the peak of the most "
            "adapters together over that of as many processes of PEFT with one each; memory_of_base_share is the base "
            "model's part of a peak. bs is the batch size.",
            "Peaks are of the allocator on CUDA and of the process on a CPU, less what the process had before the base "
            "model: what interpreter, libraries and driver take of each process does not count, in favour of many "
            "processes.",
            "In favour of PEFT: a plain loop that logs nothing, logits in trained columns alone, adapters and their "
            "optimizer in the base's dtype.",
        ),
    )


def make_workload(model: ModelPlan, number: int, vocab_size: int) -> Workload:
    """Return a workload of a number of jobs on rows whose lengths are evenly spread over those of GSM8K."""
    return Workload(
        ranks=(model.rank,) * number,
        data=random_rows(_spread_lengths(model), vocab_size),
        max_tokens_per_pass=model.max_tokens_per_pass,
    )


def draw_utilization(found: Found, axes: Sequence[Axes]) -> None:
    of_use, of_memory = axes
    steps = [row for row in found.rows if row["table"] == "step"]
    for model, size in dict.fromkeys((row["model"], row["batch_size"]) for row in steps):
        of = [row for row in steps if (row["model"], row["batch_size"]) == (model, size)]
        together = [row for row in of if row["system"] == ALTO]
        (line,) = of_use.plot(
            [row["adapters"] for row in together],
            [100 * row["device_use"] for row in together],
            "o-",
            label=f"{model}, batch size {size}",
        )
        alone = [row for row in of if row["system"] == PEFT]
        shares = [100 * row["device_use"] for row in alone]
        of_use.plot([1] * len(alone), shares, "x", color=line.get_color(), label="… one job with PEFT")
    of_use.set_ylabel("% of a large GEMM's FLOP/s")
    of_use.set_ylim(bottom=0)
    peaks = [row for row in found.rows if row["table"] == "memory"]
    for model, size in dict.fromkeys((row["model"], row["batch_size"]) for row in peaks):
        of = [row for row in peaks if (row["model"], row["batch_size"]) == (model, size)]
        together = [row for row in of if row["system"] == ALTO]
        numbers = [row["adapters"] for row in together]
        label = f"{model}, batch size {size}"
        (line,) = of_memory.plot(numbers, [row["peak_bytes"] / 1e9 for row in together], "o-", label=label)
        for row in of:
            if row["system"] == PEFT:
                separate = [number * row["peak_bytes"] / 1e9 for number in numbers]
                of_memory.plot(
                    numbers, separate, ":", color=line.get_color(), label="… as many times one process of PEFT"
                )
    of_memory.set_ylabel("memory, GB")
    of_memory.set_yscale("log")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks := sorted({row["adapters"] for row in found.rows}), [str(tick) for tick in ticks])
        axis.set_xlabel("adapters")
        axis.legend(fontsize=7, frameon=False)


def _spread_lengths(model: ModelPlan) -> list[RowLength]:
    ordered = sorted(row_lengths(model.tokenizer), key=lambda row: row.total)
    return [ordered[len(ordered) * (2 * index + 1) // (2 * model.num_rows)] for index in range(model.num_rows)]


def _described(model: ModelPlan) -> str:
    lengths = [row.total for row in _spread_lengths(model)]
    return f"{min(lengths)} to {max(lengths)}"


def _action(scale: str, model: ModelPlan, stage: str, threads: int, gate: Callable[[str], tuple[str, ...]]) -> Action:
    def action(piece: Piece, flush: Flush) -> None:
        if failures := gate(model.shape):
            raise GateFailedError(failures)
        for case in model.cases[stage]:
            if stage == "memory":
                _measure_memory(scale, model, case, threads, piece, flush)
            else:
                _measure_steps(PLANS[scale], model, case, piece)
                flush()

    return action


def _gate_failures(scale: str, shape: str) -> tuple[str, ...]:
    """Return the faults of a step of PEFT, and of ALTO with the fewest and the most adapters, on the model cut to two
    layers and a small vocabulary."""
    plan = PLANS[scale]
    (model,) = [model for model in plan.models if model.shape == shape]
    vocabulary = min(CUT_VOCABULARY, SHAPES[shape]["vocab_size"])
    cut = {**SHAPES[shape], "num_hidden_layers": CUT_LAYERS, "vocab_size": vocabulary}
    base = random_model(cut, device=plan.device, dtype=plan.dtype)
    cases = dict.fromkeys(case for cases in model.cases.values() for case in cases)
    points = dict.fromkeys((case.batch_size, _points(case)[name]) for case in cases for name in _named(case))
    failures: list[str] = []
    for size, (system, number) in points:
        workload = make_workload(model, number, vocabulary)
        found = Judge(base, workload, size).failures(system, SYSTEMS[system](base, workload))
        failures += [f"{shape}, {number} adapters, batch size {size}: {sentence}" for sentence in found]
    return tuple(failures)


def _measure_steps(plan: Plan, model: ModelPlan, case: Case, piece: Piece) -> None:
    vocabulary = SHAPES[model.shape]["vocab_size"]
    base = random_model(SHAPES[model.shape], device=plan.device, dtype=plan.dtype)
    points = _points(case)
    epochs = {
        name: partial(SYSTEMS[system](base, make_workload(model, number, vocabulary)).epoch, case.batch_size)
        for name, (system, number) in points.items()
    }
    multiply, gemm_flops = large_gemm(plan.device, plan.dtype)
    turns = take_turns({_GEMM: lambda: [multiply() for _ in range(_GEMMS)], **epochs}, plan.repeats, plan.device)
    for name, reason in turns.failed.items():
        piece.errors.append(f"{piece.name}, batch size {case.batch_size}: {name}: {reason}")
    one = make_workload(model, 1, vocabulary)
    # In a batch of all rows every row is trained once, as in an epoch of small batches.
    flops = sum(count(base, one, model.num_rows) for count in (base_flops, lora_flops))
    num_tokens = sum(map(len, one.data.train.input_ids))
    few = _point_name(ALTO, case.numbers[0])
    rows = []
    for name, (system, number) in points.items():
        if name not in turns.seconds:
            continue
        tokens_per_s = spread(number * num_tokens / duration_s for duration_s in turns.seconds[name])
        row = {
            **_columns("step", model, case, system, number),
            "samples_per_s": tokens_per_s.median * model.num_rows / num_tokens,
            **with_extremes("tokens_per_s", tokens_per_s),
        }
        for column, other, share in (
            ("device_use", _GEMM, number * flops / (_GEMMS * gemm_flops)),
            ("over_one", few, number / case.numbers[0]),
            ("over_peft", PEFT, float(number)),
        ):
            if other in turns.seconds:
                row |= with_extremes(column, _scaled(turns.ratio(other, name), share))
        rows.append(row)
    piece.rows += rows
    piece.figures |= _figures_of_steps(rows, case, model)


def _figures_of_steps(rows: Sequence[Mapping[str, Any]], case: Case, model: ModelPlan) -> dict[str, float]:
    by_name, suffix = {_point_name(row["system"], row["adapters"]): row for row in rows}, _suffix(case, model)
    figures = {
        f"device_use_{name}_{suffix}": by_name[name]["device_use"]
        for name in _named(case)
        if "device_use" in by_name.get(name, {})
    }
    most = by_name.get(_point_name(ALTO, case.numbers[-1]), {})
    for figure, column in (("device_use_ratio", "over_one"), ("tokens_per_s_over_peft", "over_peft")):
        if column in most:
            figures[f"{figure}_{suffix}"] = most[column]
    return figures


def _measure_memory(scale: str, model: ModelPlan, case: Case, threads: int, piece: Piece, flush: Flush) -> None:
    rows = list[dict[str, Any]]()
    for system, number in _points(case).values():
        request = {
            "scale": scale,
            "shape": model.shape,
            "system": system,
            "num_adapters": number,
            "batch_size": case.batch_size,
            "threads": threads,
        }
        where = f"{piece.name}, batch size {case.batch_size}: {system}, {number} adapters"
        try:
            found = in_child(request, CHILD)
        except Exception as error:
            piece.errors.append(f"{where}: {describe_error(error)}")
            continue
        peak, base = found["peak_bytes"], found["base_bytes"]
        if peak <= base:
            raise GateFailedError([f"{where}: a peak of {peak} bytes, not more than the {base} of the base model"])
        row = {
            **_columns("memory", model, case, system, number),
            "peak_bytes": peak,
            "base_bytes": base,
            "bytes_per_adapter": (peak - base) / number,
            "base_share": base / peak,
        }
        rows.append(row)
        if rows[0]["system"] == PEFT:  # it is the first row, unless it failed
            row["over_processes"] = peak / (number * rows[0]["peak_bytes"])
        piece.rows.append(row)
        flush()
    piece.figures |= _figures_of_memory(rows, case, model)


def _figures_of_memory(rows: Sequence[Mapping[str, Any]], case: Case, model: ModelPlan) -> dict[str, float]:
    by_name, suffix = {_point_name(row["system"], row["adapters"]): row for row in rows}, _suffix(case, model)
    figures = {
        f"memory_of_base_share_{name}_{suffix}": by_name[name]["base_share"] for name in _named(case) if name in by_name
    }
    most = by_name.get(_point_name(ALTO, case.numbers[-1]), {})
    if "over_processes" in most:
        figures[f"memory_per_adapter_ratio_{suffix}"] = most["over_processes"]
    return figures


def _points(case: Case) -> dict[str, tuple[str, int]]:
    """Return system and number of adapters of each measurement, by name: PEFT with one job, ALTO with each number."""
    points = ((PEFT, 1), *((ALTO, number) for number in case.numbers))
    return {_point_name(system, number): (system, number) for system, number in points}


def _point_name(system: str, number: int) -> str:
    return PEFT if system == PEFT else str(number)


def _named(case: Case) -> tuple[str, ...]:
    """Return the measurements that have separate figures: PEFT, and ALTO with the fewest and the most adapters."""
    return (PEFT, _point_name(ALTO, case.numbers[0]), _point_name(ALTO, case.numbers[-1]))


def _columns(table: str, model: ModelPlan, case: Case, system: str, number: int) -> dict[str, Any]:
    return {
        "table": table,
        "model": model.shape,
        "batch_size": case.batch_size,
        "system": system,
        "adapters": number,
    }


def _scaled(value: Spread, factor: float) -> Spread:
    return replace(value, median=factor * value.median, minimum=factor * value.minimum, maximum=factor * value.maximum)


def _suffix(case: Case, model: ModelPlan) -> str:
    return f"bs{case.batch_size}_{model.shape}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    models = {scale: [model.shape for model in plan.models] for scale, plan in PLANS.items()}
    return piece_options(__doc__, models, STAGES, arguments)
