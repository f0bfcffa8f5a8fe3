"""The ways on clusters that are not at hand, on paper: time of a step from bytes and operations. Pure.

A 70-billion base in bfloat16 on H100s, eight a node. The bytes are those of ``volume.py``, which the gate holds against
what is counted. What is assumed beyond them stands in ``benchmarks/notes/adapter_parallel.md``.
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
"""Of one GPU, each way: within its node, and through its own adapter of 400 Gb/s to others."""

FLOPS_PER_S = 989e12 * 0.5
"""Dense bfloat16 of an H100, half of which is reached."""


def seconds(way: str, step: Step) -> float:
    """How long ``way`` takes for a step of all adapters."""
    return _SECONDS[way](step, VOLUMES[way](step))


def paper_rows() -> list[dict[str, Any]]:
    """Every way on 8 to 64 GPUs."""
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
    """Gathering goes on under computing, as far as there is something to compute."""
    rows = math.ceil(step.batch_size / step.num_ranks)
    return max(step.num_jobs * _compute_s(step, rows * step.length), _collective_s(step, volume.total))


def _tp(step: Step, volume: Volume) -> float:
    """Every all-reduce is waited for: the next product needs it."""
    return step.num_jobs * _compute_s(step, step.job_tokens) / step.num_ranks + _collective_s(step, volume.total)


def _pp(step: Step, volume: Volume) -> float:
    """As many turns as rows, and one for each further stage; sending goes on under computing, over the slowest link."""
    crossings = 2 * (step.num_ranks - 1) * step.num_jobs * step.batch_size
    link = NVLINK_BYTES_PER_S if step.num_ranks <= GPUS_PER_NODE else INFINIBAND_BYTES_PER_S
    turn_s = max(_compute_s(step, step.length) / step.num_ranks, 2 * volume.activations / crossings / link)
    return step.num_jobs * (step.batch_size + step.num_ranks - 1) * turn_s


def _ap(step: Step, volume: Volume) -> float:
    """One pass on every GPU, over the rows of its own adapters; gathering goes on under computing."""
    jobs = math.ceil(step.num_jobs / step.num_ranks)
    return max(_compute_s(step, jobs * step.job_tokens), _collective_s(step, volume.total))


_SECONDS: Mapping[str, Callable[[Step, Volume], float]] = {"fsdp": _fsdp, "tp": _tp, "pp": _pp, "ap": _ap}


def _compute_s(step: Step, num_tokens: int) -> float:
    """Of one GPU: the base forward and backward, which has no gradients of weights."""
    numbers = step.layers * step.layer_numbers + step.vocabulary * step.hidden
    return 4 * numbers * num_tokens / FLOPS_PER_S


def _collective_s(step: Step, num_bytes: int) -> float:
    """Of bytes that all ranks send in collectives. Between nodes goes each part once to each node, over the adapters of
    all of its GPUs, while it is handed on within."""
    num_nodes = math.ceil(step.num_ranks / GPUS_PER_NODE)
    within = num_bytes / NVLINK_BYTES_PER_S
    between = num_bytes * (num_nodes - 1) / (step.num_ranks - 1) / INFINIBAND_BYTES_PER_S
    return max(within, between) / step.num_ranks
