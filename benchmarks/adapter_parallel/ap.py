"""``ap``: ALTO. The base is sharded over the ranks, and the adapters are distributed among them."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from transformers import PreTrainedModel

from alto.executor import Ranks
from alto.lora import AdapterWeights
from benchmarks.kernels.variants import JobFacts, Ours
from benchmarks.kernels.workload import Workload

__all__ = ["AdapterParallel"]


class AdapterParallel:
    """The trainer as the executor uses it, with equally many adapters on every rank."""

    def __init__(self, base: PreTrainedModel, workload: Workload) -> None:
        self._ours = Ours(base, workload, ranks=Ranks(dist.get_rank(), dist.get_world_size()))

    def step(self, batch_size: int) -> None:
        self._ours.step(batch_size)

    def facts(self, batch_size: int, weights: Sequence[AdapterWeights]) -> dict[int, JobFacts]:
        return self._ours.facts_here(batch_size, weights)
