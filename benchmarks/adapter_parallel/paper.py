"""Computes the time of a step for every way on clusters that are not available, from bytes and operations. Pure.

The model has a base of 70 billion parameters in bfloat16 on H100s, eight per node. The bytes are those of
``volume.py``, which the gate compares with counted bytes. ``benchmarks/notes/adapter-parallel.md`` has all further
assumptions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.adapter_parallel.volume import VOLUMES, Step, Volume

__all__ = ["BATCH_SIZES", "LLAMA_70B", "NUM_GPUS", "paper_rows", "seconds"]

LLAMA_70B = {
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
NUM_GPUS, BATCH_SIZES = (8, 16, 32, 64), (1, 2, 4, 8)
NUM_JOBS, ADAPTER_RANK, LENGTH = 64, 16, 256

GPUS_PER_NODE = 8
NVLINK_BYTES_PER_S = 450e9
INFINIBAND_BYTES_PER_S = 50e9
"""Bandwidth of one GPU in each direction: within its node, and to other nodes through its own 400 Gb/s network
adapter."""

FLOPS_PER_S = 989e12 * 0.5
"""Rate of dense bfloat16 products on an H100, half of which is assumed to be reached."""


def seconds(way: str, step: Step) -> float:
    """Return the seconds that ``way`` takes for a step of all adapters."""
    return _SECONDS[way](step, VOLUMES[way](step))


def paper_rows() -> list[dict[str, Any]]:
    """Return a row for every way on 8 to 64 GPUs."""
    rows = []
    for num_gpus in NUM_GPUS:
        for batch_size in BATCH_SIZES:
            step = Step.of(
                LLAMA_70B,
                num_ranks=num_gpus,
                num_jobs=NUM_JOBS,
                batch_size=batch_size,
                length=LENGTH,
                adapter_rank=ADAPTER_RANK,
                number_bytes=2,
            )
            for way in VOLUMES:
                rows.append(
                    {
                        "table": "paper",
                        "way": way,
                        "gpus": num_gpus,
                        "batch_size": batch_size,
                        "tokens_per_s": NUM_JOBS * step.job_tokens / seconds(way, step),
                        "bytes_per_step": VOLUMES[way](step).total,
                    }
                )
    return rows


def _fsdp(step: Step, volume: Volume) -> float:
    """Return the seconds of ``fsdp``. Gathering overlaps with computing, as far as there is something to compute."""
    rows = math.ceil(step.batch_size / step.num_ranks)
    return max(step.num_jobs * _compute_s(step, rows * step.length), _collective_s(step, volume.total))


def _tp(step: Step, volume: Volume) -> float:
    """Return the seconds of ``tp``. Every all-reduce is waited for, because the next product needs it."""
    return step.num_jobs * _compute_s(step, step.job_tokens) / step.num_ranks + _collective_s(step, volume.total)


def _pp(step: Step, volume: Volume) -> float:
    """Return the seconds of ``pp``: one turn per row, and one for each further stage. Sending over the slowest link
    overlaps with computing."""
    crossings = 2 * (step.num_ranks - 1) * step.num_jobs * step.batch_size
    link = NVLINK_BYTES_PER_S if step.num_ranks <= GPUS_PER_NODE else INFINIBAND_BYTES_PER_S
    turn_s = max(_compute_s(step, step.length) / step.num_ranks, 2 * volume.activations / crossings / link)
    return step.num_jobs * (step.batch_size + step.num_ranks - 1) * turn_s


def _ap(step: Step, volume: Volume) -> float:
    """Return the seconds of ``ap``: one pass on every GPU, over the rows of its own adapters. Gathering overlaps with
    computing."""
    jobs = math.ceil(step.num_jobs / step.num_ranks)
    return max(_compute_s(step, jobs * step.job_tokens), _collective_s(step, volume.total))


_SECONDS: Mapping[str, Callable[[Step, Volume], float]] = {"fsdp": _fsdp, "tp": _tp, "pp": _pp, "ap": _ap}


def _compute_s(step: Step, num_tokens: int) -> float:
    """Return the seconds of one GPU for the base: forward, and backward without gradients of weights."""
    numbers = step.layers * step.layer_numbers + step.vocabulary * step.hidden
    return 4 * numbers * num_tokens / FLOPS_PER_S


def _collective_s(step: Step, num_bytes: int) -> float:
    """Return the seconds for bytes that all ranks send in collectives. Each part goes once to each other node, over the
    network adapters of all of its GPUs, while it is passed on within the nodes."""
    num_nodes = math.ceil(step.num_ranks / GPUS_PER_NODE)
    within = num_bytes / NVLINK_BYTES_PER_S
    between = num_bytes * (num_nodes - 1) / (step.num_ranks - 1) / INFINIBAND_BYTES_PER_S
    return max(within, between) / step.num_ranks
