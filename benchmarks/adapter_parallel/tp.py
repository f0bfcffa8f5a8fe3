"""``tp``: every linear layer is split over the ranks, which all have the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from benchmarks.adapter_parallel.one_by_one import OneByOne, token_loss
from benchmarks.kernels.variants import peft_model
from benchmarks.kernels.workload import Workload

__all__ = ["TensorParallel"]

_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("self_attn.o_proj", "mlp.down_proj")


class TensorParallel(OneByOne):
    """Tensor parallelism: q, k, v, gate and up are split by columns, o and down by rows, and the output head with its
    loss by columns.

    If a layer is split by columns, ``B`` of its adapter is split in the same way and ``A`` is whole; if it is split by
    rows, ``A`` is split and ``B`` is whole. So the adapters add only two things to the traffic of the base: an
    all-reduce of ``[T, r]`` for each of the two layers that are split by rows, in the forward pass; and one all-reduce
    of the gradients of all whole ``A``, at the end of the backward pass.
    """

    def __init__(self, base: PreTrainedModel, workload: Workload) -> None:
        model: Any = peft_model(base, workload.ranks[0])
        mesh = init_device_mesh(base.device.type, (dist.get_world_size(),))
        for layer in model.base_model.model.model.layers:
            for name in _COLUMNS:
                distribute_module(layer.get_submodule(f"{name}.lora_A.default"), mesh)
            parallelize_module(layer, mesh, _layer_plan())
        head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model.base_model.model, mesh, {"lm_head": head})
        self._model, self._device = model, base.device
        parameters = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        super().__init__(workload, parameters, whole=[name for name, one in parameters if not isinstance(one, DTensor)])

    def backward(self, rows: Sequence[int]) -> Tensor:
        ids, targets, num_trained = self.batch(rows, self._device)
        with loss_parallel():
            loss: Any = token_loss(self._model(input_ids=ids, use_cache=False).logits, targets, num_trained)
            loss.backward()
        self._add_up()
        whole: Tensor = loss.detach().to_local() / dist.get_world_size()
        return whole

    @torch.no_grad()
    def _add_up(self) -> None:
        """Add up the gradients of each whole ``A``, which every rank has found through its own columns of ``B``: one
        all-reduce for all."""
        partial: list[Any] = [
            one
            for one in self._parameters.values()
            if isinstance(one.grad, DTensor) and one.grad.placements[0].is_partial()
        ]
        flat = torch.cat([one.grad.to_local().flatten() for one in partial])
        dist.all_reduce(flat)
        for one, part in zip(partial, flat.split([one.numel() for one in partial]), strict=True):
            one.grad = DTensor.from_local(part.view(one.shape), one.device_mesh, [Replicate()], run_check=False)


def _layer_plan() -> dict[str, Any]:
    plan: dict[str, Any] = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Replicate()},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "mlp": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
    }
    for name in _COLUMNS:
        plan |= {f"{name}.base_layer": ColwiseParallel(), f"{name}.lora_B.default": ColwiseParallel()}
    for name in _ROWS:
        plan |= {f"{name}.base_layer": RowwiseParallel(), f"{name}.lora_A.default": RowwiseParallel()}
    return plan
