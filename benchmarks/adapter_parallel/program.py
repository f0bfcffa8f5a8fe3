"""Measures the training of adapters on several ranks, in four ways: tokens per second, and bytes on the wire.

``fsdp`` shards base and adapter and trains one adapter at a time, with its batch split over the ranks and padded to a
multiple of their number. ``tp`` splits every linear layer (``torch.distributed.tensor.parallel``), and ``pp`` splits
the layers (``torch.distributed.pipelining``); both train one adapter at a time. ``ap`` is ALTO: the base is sharded,
and every rank has adapters of its own. All ways have the same weights and rows, and take turns on the same ranks. The
gate: first losses and gradients equal those of PEFT in one process, and the bytes counted on the wire equal those of
the laws in ``volume.py``. From these laws the ways are then computed for 8 to 64 H100s.

    python -m benchmarks.paper adapter-parallel --scale cpu
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.adapter_parallel.gate import TOLERANCE
from benchmarks.adapter_parallel.paper import NUM_JOBS, paper_rows
from benchmarks.adapter_parallel.plans import GOALS, PLANS, Plan
from benchmarks.adapter_parallel.ranks import WAYS, Cell, Findings, measure
from benchmarks.adapter_parallel.volume import VOLUMES, Step
from benchmarks.common import format_table, option_parser, publish_figures, spread

OTHERS = tuple(way for way in WAYS if way != "ap")


def main(arguments: Sequence[str] | None = None) -> int:
    options = option_parser(__doc__, PLANS).parse_args(arguments)
    plan = PLANS[options.scale]
    if plan.device == "cuda" and torch.cuda.device_count() < 2:
        raise SystemExit(
            f"--scale gpu: expected two NVIDIA GPUs or more, found {torch.cuda.device_count()}; choose --scale cpu"
        )
    findings = measure(plan)
    failures = [*findings.failures, *wire_failures(findings, plan)]
    rows = [*measured_rows(findings, plan), *paper_rows()]
    for table in dict.fromkeys(row["table"] for row in rows):
        chosen = [{key: value for key, value in row.items() if key != "table"} for row in rows if row["table"] == table]
        print(f"{table}\n{format_table(list(chosen[0]), (list(row.values()) for row in chosen))}\n")
    return publish_figures(
        options,
        "adapter_parallel",
        gate_failures=failures,
        figures=lambda: figures(findings, plan),
        goals=GOALS,
        rows=rows,
        notes=notes(findings, plan),
    )


def figures(findings: Findings, plan: Plan) -> dict[str, float]:
    """Return the ratios of throughput at each batch size (the median over rounds of the ratio within a round), and the
    bytes of adapters on the wire under ``ap``."""
    cell = {(cell.way, cell.batch_size): cell for cell in findings.cells}
    ratios = {
        (way, size): statistics.median(
            other / ours for other, ours in zip(cell[way, size].seconds, cell["ap", size].seconds, strict=True)
        )
        for way in OTHERS
        for size in plan.batch_sizes
    }
    law = VOLUMES["ap"](step(findings, plan, plan.batch_sizes[0]))
    return {
        **{f"over_fsdp_bs{size}": ratios["fsdp", size] for size in plan.batch_sizes},
        "over_best_other": min(ratios.values()),
        **{f"over_{way}_least": min(ratios[way, size] for size in plan.batch_sizes) for way in OTHERS},
        "adapter_bytes": max(total_bytes(cell["ap", size]) for size in plan.batch_sizes) - law.base - law.scalars,
    }


def wire_failures(findings: Findings, plan: Plan) -> list[str]:
    """Return the differences between counted bytes and the laws, by which ``ap`` sends no bytes of adapters."""
    failures = []
    for cell in findings.cells:
        expected = VOLUMES[cell.way](step(findings, plan, cell.batch_size)).total
        if total_bytes(cell) != expected:
            failures.append(
                f"{cell.way}, batch size {cell.batch_size}: {total_bytes(cell):,.0f} bytes on the wire where the law "
                f"says {expected:,}"
            )
    return failures


def measured_rows(findings: Findings, plan: Plan) -> list[dict[str, Any]]:
    rows = []
    for cell in findings.cells:
        num_tokens = plan.num_jobs * cell.batch_size * plan.length
        rate = spread(num_tokens / seconds for seconds in cell.seconds)
        rows.append(
            {
                "table": "measured",
                "way": cell.way,
                "batch_size": cell.batch_size,
                "tokens_per_s": rate.median,
                "least": rate.minimum,
                "most": rate.maximum,
                "bytes_per_step": total_bytes(cell),
                **{f"{kind}_bytes": cell.sent_bytes.get(kind, 0.0) for kind in _kinds(findings)},
            }
        )
    return rows


def total_bytes(cell: Cell) -> float:
    return sum(cell.sent_bytes.values())


def step(findings: Findings, plan: Plan, batch_size: int) -> Step:
    """Return a timed step in the form that the laws take."""
    return Step.of(
        plan.shape,
        num_ranks=findings.num_ranks,
        num_jobs=plan.num_jobs,
        batch_size=batch_size,
        length=plan.length,
        adapter_rank=plan.adapter_rank,
        number_bytes=plan.dtype.itemsize,
    )


def notes(findings: Findings, plan: Plan) -> list[str]:
    shape = plan.shape
    return [
        f"{findings.num_ranks} ranks{', a thread each,' if plan.device == 'cpu' else ''} and {plan.num_jobs} adapters "
        f"of rank {plan.adapter_rank} on all linear layers; rows of {plan.length} tokens; a Llama with hidden size "
        f"{shape['hidden_size']}, {shape['num_hidden_layers']} layers, vocabulary {shape['vocab_size']}, random "
        f"weights, {str(plan.dtype).removeprefix('torch.')}.",
        f"Gate: losses and gradients of every adapter at every batch size within {TOLERANCE:g} (relative, in norm) of "
        f"PEFT in one process, in float32 on {plan.num_ranks} layers; bytes on the wire are those of the laws, "
        "to the byte.",
        "over_best_other is the least, over batch sizes and other ways, of ap's throughput over theirs.",
        *_paper_notes(paper_rows()),
    ]


def _paper_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    rate = {(row["way"], row["gpus"], row["batch_size"]): row["tokens_per_s"] for row in rows}
    gpus = sorted({row["gpus"] for row in rows})
    lines = []
    for size in sorted({row["batch_size"] for row in rows}):
        over = {
            way: ", ".join(f"{rate['ap', number, size] / rate[way, number, size]:.2g}" for number in gpus)
            for way in OTHERS
        }
        lines.append(
            f"On paper, a 70B base and {NUM_JOBS} adapters at batch size {size}, on {', '.join(map(str, gpus))} H100s: "
            + "; ".join(f"{ratios} times the throughput of {way}" for way, ratios in over.items())
            + "."
        )
    return lines


def _kinds(findings: Findings) -> list[str]:
    return sorted({kind for cell in findings.cells for kind in cell.sent_bytes})
