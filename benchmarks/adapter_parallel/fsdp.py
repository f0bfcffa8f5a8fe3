"""``fsdp``: base and adapter are sharded with FSDP2, and the batch is split over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from benchmarks.adapter_parallel.one_by_one import OneByOne, token_loss
from benchmarks.kernels.variants import peft_model
from benchmarks.kernels.workload import Workload

__all__ = ["FullySharded"]


class FullySharded(OneByOne):
    """One FSDP unit per layer. The last layer and everything outside of layers stay gathered until their backward pass,
    as in torchtitan.

    A batch is padded to a multiple of the number of ranks, so that every rank has equally many rows: each rank has to
    gather the base, however few rows it has. Predictions of padding rows are not trained.
    """

    def __init__(self, base: PreTrainedModel, workload: Workload) -> None:
        model: Any = peft_model(base, workload.ranks[0])
        mesh = init_device_mesh(base.device.type, (dist.get_world_size(),))
        layers = model.base_model.model.model.layers
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=layer is not layers[-1])
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        self._model, self._device = model, base.device
        super().__init__(workload, [(name, one) for name, one in model.named_parameters() if one.requires_grad])

    def backward(self, rows: Sequence[int]) -> Tensor:
        ids, targets, num_trained = self.batch(rows, self._device)
        rank, size = dist.get_rank(), dist.get_world_size()
        num_padding = -len(rows) % size
        ids = torch.cat([ids, ids[:1].expand(num_padding, -1)]).chunk(size)[rank]
        targets = torch.cat([targets, torch.full_like(targets[:1], -100).expand(num_padding, -1)]).chunk(size)[rank]
        loss = token_loss(self._model(input_ids=ids, use_cache=False).logits, targets, num_trained)
        (loss * size).backward()  # FSDP takes the mean of the ranks' gradients
        return loss.detach()
