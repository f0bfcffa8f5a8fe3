"""The check that a saved adapter fits a base model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from alto.errors import TargetModuleError
from alto.lora.biases import biases_of
from alto.lora.heads import HEAD, whole_shapes
from alto.lora.layout import ExtraTensor
from alto.lora.magnitudes import is_magnitude, magnitude_of
from alto.lora.saved import SavedAdapter
from alto.lora.targets import adaptable, base_modules


@torch.no_grad()
def initial_values(model: PreTrainedModel, extras: Iterable[ExtraTensor]) -> dict[str, Tensor]:
    """Return the values of ``extras`` before the first step, by name.

    If the model is sharded, all ranks must make the same call, because each parameter is gathered from all of them.

    Args:
        model: The base model, with or without injected adapters.
        extras: Parameters of the model's modules; magnitude vectors, which start as the row norms of the weights; and
            classification heads, which the base model does not have. A head of any size gets a single zero until a job
            draws its own values.
    """
    modules = base_modules(model)
    return {
        extra.name: torch.zeros(())
        if extra.name == HEAD
        else _of_module(modules[extra.name.rpartition(".")[0]], extra.name)
        for extra in extras
    }


def _of_module(module: Any, name: str) -> Tensor:
    if is_magnitude(name):
        weight = _whole(module.weight)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return torch.linalg.vector_norm(weight, dim=0 if isinstance(module, Conv1D) else 1, dtype=dtype)
    return _whole(getattr(module, name.rpartition(".")[2]))


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def check_fit(network: PreTrainedModel, adapter: SavedAdapter, base: str, *, remedy: str, otherwise: str = "") -> None:
    """Check that ``network`` has a module for every tensor of ``adapter``, except a classification head.

    Args:
        network: The base model, with or without injected adapters.
        base: Name of the base model, for error messages.
        remedy: Advice in error messages: how to name another base model.
        otherwise: Further advice in error messages, for tensors that ALTO does not support.

    Raises:
        TargetModuleError: A tensor belongs to a module that the model does not have, or has the wrong shape.
    """
    modules = {module.name: module for module in adaptable(network)}
    absent = sorted(set(adapter.weights) - set(modules))
    if absent:
        others = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise TargetModuleError(
            f"{adapter.folder}: expected every module of the adapter to be a linear layer or the embeddings of "
            f"the base model {base}, found that {absent[0]}{others} is not; {remedy}"
        )
    _check_extras(network, adapter, base, f"{remedy}{otherwise}")
    _check_base_weights(network, adapter, base, f"{remedy}{otherwise}")
    for name, (a_KR, b_RN) in adapter.weights.items():
        experts, wanted = modules[name].num_experts, (modules[name].in_features, modules[name].out_features)
        found = (a_KR.shape[-2], b_RN.shape[-1])
        are_as_many = a_KR.shape[:-2] == b_RN.shape[:-2] == (() if experts is None else (experts,))
        if wanted != found or a_KR.shape[-1] != b_RN.shape[-2] or not are_as_many:
            raise TargetModuleError(
                f"{adapter.folder}: expected an adapter for {name} of the base model {base}, {wanted[0]} × "
                f"{wanted[1]}, found matrices of shapes {tuple(a_KR.shape)} and {tuple(b_RN.shape)}; {remedy}"
            )


def _check_extras(network: PreTrainedModel, adapter: SavedAdapter, base: str, remedy: str) -> None:
    shapes = (
        biases_of(network)
        | whole_shapes(network)
        | {
            magnitude_of(module.name): (module.out_features,)
            for module in adaptable(network)
            if not module.num_experts and module.is_in_body
        }
    )
    for name, tensor in adapter.weights.extras.items():
        if name != HEAD and shapes.get(name) != tensor.shape:
            found = f"of {tuple(tensor.shape)}" if name in shapes else "which the model does not have"
            raise TargetModuleError(
                f"{adapter.folder}: expected magnitudes of linear layers, biases of linear layers and of LayerNorm, "
                f"the output head and the embeddings of the base model {base}, found {name}, {found}; {remedy}"
            )


def _check_base_weights(network: PreTrainedModel, adapter: SavedAdapter, base: str, remedy: str) -> None:
    """Check that the base weights in PEFT's file equal those of ``network``, because PEFT would load them into the base
    model."""
    for name, saved in adapter.base_weights.items():
        held = initial_values(network, [ExtraTensor(name=name, shape=tuple(saved.shape))])[name].cpu()
        if not torch.equal(held, saved.to(held.dtype)):
            raise TargetModuleError(
                f"{adapter.folder}: expected {name}, which PEFT saved with the adapter, to equal the weights of the "
                f"base model {base}, found weights of a different base model, or of one that was trained or resized; "
                f"{remedy}"
            )
