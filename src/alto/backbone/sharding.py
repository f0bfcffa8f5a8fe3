"""A frozen base model whose parameters are sharded over ranks and gathered layer by layer.

Every rank keeps a part of every parameter (FSDP2's ``fully_shard``). It gathers a layer for its forward pass and again
for its backward pass, and prefetches the next layer meanwhile. Nothing is reduced, because a frozen base model has no
gradients. Every rank must run the same forward and backward passes, each on its own tokens.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import output_capturing

from alto.errors import UnsupportedModelError


def find_body(model: PreTrainedModel) -> Any:
    """Return the part of a causal LM that returns the final hidden states; the model itself if it has no such part."""
    body = model.base_model
    if body is model:  # in some classes the name differs from ``base_model_prefix``
        body = getattr(model, "model", model)
    return body


def shard(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shard ``model`` in place: keep this rank's part of every parameter. Parameters may be on the meta device.

    Each layer, the embeddings and the output head are gathered as a whole, and only while they are used: a layer for
    its forward pass and again for its backward pass, while the next layer is prefetched. The embeddings and the output
    head have no backward pass.

    Raises:
        UnsupportedModelError: The model is not built of layers.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UnsupportedModelError(
            f"num_gpus: expected a model built of transformers' layers, found {type(model).__name__} without any; set "
            "num_gpus to 1, or use another base model"
        )
    model.requires_grad_(False)
    embeddings: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    is_tied = head.weight is embeddings.weight
    for part in (*layers, embeddings, *(() if is_tied else (head,))):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    body: Any = fully_shard(find_body(model), mesh=mesh)
    # FSDP has changed the class of the body; transformers looks up by class which extra outputs a model can return.
    output_capturing._CAN_RECORD_REGISTRY[body] = getattr(body, "_can_record_outputs", None)
    body._set_unshard_async_op(True)  # else a layer's bytes would be in memory twice until the next one is gathered
    embeddings.set_unshard_in_backward(False)
    if is_tied:
        head.weight = embeddings.weight
    for before, after in itertools.pairwise(layers):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])


@torch.no_grad()
def find_roots(model: PreTrainedModel) -> None:
    """Initialise FSDP after the parameters have values; body and output head are its root modules.

    Modules that are gathered by hand (:class:`alto.backbone.output_head.OutputHead`) must be initialised before that.
    All ranks call this together.
    """
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    hidden = find_body(model)(input_ids=token, use_cache=False).last_hidden_state
    head: Any = model.get_output_embeddings()
    if is_sharded(head):
        head(hidden)


def forget_micro_batch(model: PreTrainedModel) -> None:
    """Clean up after a forward pass without a backward pass; otherwise FSDP keeps references to its layers until the
    next backward pass.

    PyTorch before 2.13 cannot drop them; it keeps a few references per forward pass until the next training step.
    """
    body: Any = find_body(model)
    if is_sharded(body) and hasattr(body, "reset_iter_state"):
        body.reset_iter_state()


def held_bytes(model: nn.Module) -> int:
    """Return the bytes of the parameters and buffers of ``model`` on this rank between forward passes."""
    kept = {id(value): value for value in (*model.state_dict(keep_vars=True).values(), *model.buffers())}
    return sum((value.to_local() if isinstance(value, DTensor) else value).nbytes for value in kept.values())


def is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP gathers and frees the parameters of ``module`` itself."""
    return isinstance(module, FSDPModule)
