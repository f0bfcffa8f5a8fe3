"""Converts the quantised layers of a base model to plain layers with the dequantised weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alto.backbone.model_class import auto_class
from alto.backbone.quantised import QuantisedLinear

__all__ = ["dequantised"]


def dequantised(network: PreTrainedModel, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return a model of the same class with plain linear layers, in the dtype of ``network``; its logits are equal, and
    it can be saved. If nothing is quantised, return ``network`` itself.

    Args:
        network: A result of :func:`alto.backbone.load_network`.
        trust_remote_code: Whether to allow the Python code that comes with the model.
    """
    layers = {name: module for name, module in network.named_modules() if isinstance(module, QuantisedLinear)}
    if not layers:
        return network
    config = copy.deepcopy(network.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain: Any = auto_class(config).from_config(config, dtype=network.dtype, trust_remote_code=trust_remote_code)
    packed = {f"{name}.packed" for name in layers}
    weights: dict[str, Tensor] = {name: value for name, value in network.state_dict().items() if name not in packed}
    with torch.no_grad():
        weights |= {f"{name}.weight": layer.weight for name, layer in layers.items()}
    plain.load_state_dict(weights)
    plain.generation_config = network.generation_config
    model: PreTrainedModel = plain.to(network.device).eval().requires_grad_(False)
    return model
