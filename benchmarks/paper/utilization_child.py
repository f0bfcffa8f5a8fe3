"""``python -m benchmarks.paper.utilization_child``: the peak of memory of an epoch, in a process of its own.

The request is on stdin, and the result on the last line of stdout; both are JSON.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from alto.executor.profiling.meter import peak_bytes, reset_peak
from benchmarks.kernels.shapes import SHAPES, random_model
from benchmarks.paper.utilization import PLANS, SYSTEMS, make_workload

__all__ = ["answer"]


def answer(request: dict[str, Any]) -> dict[str, int]:
    """Return the peak of an epoch of ``request["num_adapters"]`` jobs of a model of ``request["scale"]``, including the
    base model, and the bytes of the base model alone. Memory that the process had before does not count."""
    torch.set_num_threads(request["threads"])
    plan = PLANS[request["scale"]]
    (model,) = [model for model in plan.models if model.shape == request["shape"]]
    build, batch_size = SYSTEMS[request["system"]], request["batch_size"]

    # Libraries load and allocate memory in their first step, so this happens before the base model is loaded.
    small = random_model(SHAPES["smoke"], device=plan.device, dtype=plan.dtype)
    build(small, make_workload(model, 1, SHAPES["smoke"]["vocab_size"])).epoch(model.num_rows)
    del small
    gc.collect()
    reset_peak(plan.device)
    before = _peak(plan.device)

    base = random_model(SHAPES[model.shape], device=plan.device, dtype=plan.dtype)
    workload = make_workload(model, request["num_adapters"], SHAPES[model.shape]["vocab_size"])
    build(base, workload).epoch(batch_size)
    return {"peak_bytes": _peak(plan.device) - before, "base_bytes": _bytes_of(base)}


def _peak(device: torch.device) -> int:
    """Return the peak of the tensors on CUDA, without further memory of the allocator; otherwise that of the
    process."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_bytes(device)


def _bytes_of(model: PreTrainedModel) -> int:
    tensors = itertools.chain(model.parameters(), model.buffers())
    storages = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
