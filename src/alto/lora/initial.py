"""Initial values of the extra tensors of adapters, read from the base model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from alto.lora.heads import HEAD
from alto.lora.layout import ExtraTensor
from alto.lora.magnitudes import is_magnitude
from alto.lora.targets import base_modules

__all__ = ["initial_values"]


@torch.no_grad()
def initial_values(model: PreTrainedModel, extras: Iterable[ExtraTensor]) -> dict[str, Tensor]:
    """Return the values of ``extras`` before the first step, by name.

    If the model is sharded, all ranks must make the same call, because each parameter is gathered from all of them.

    Args:
        model: The base model, with or without injected adapters.
        extras: Parameters of the model's modules; magnitude vectors, which start as the row norms of the weights; and
            classification heads, which the base model does not have: these get a single zero, whatever their size,
            until a job draws its own.
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
