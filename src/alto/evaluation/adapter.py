"""Adapters from folders on one base, unmerged, as PEFT adds each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.errors import TargetModuleError
from alto.lora import (
    HEAD,
    ExtraTensor,
    SavedAdapter,
    ServedAdapters,
    adaptable,
    biases_of,
    initial_values,
    magnitude_of,
    serving,
    whole_shapes,
)

__all__ = ["loaded_adapters"]


@contextlib.contextmanager
def loaded_adapters(backbone: Backbone, adapters: Sequence[SavedAdapter | None], base: str) -> Iterator[ServedAdapters]:
    """Put ``adapters`` on ``backbone`` while the context lasts, one per slot; None is the base alone.

    Args:
        base: The name of the base model, for messages.

    Raises:
        TargetModuleError: An adapter does not fit the model.
    """
    for adapter in adapters:
        if adapter is not None:
            _check_fit(backbone.model, adapter, base)
    weights = [None if adapter is None else (adapter.weights, adapter.scales) for adapter in adapters]
    with serving(backbone.model, weights, backbone.run_once, backbone.rows_in_pass) as served:
        yield served


def _check_fit(network: PreTrainedModel, adapter: SavedAdapter, base: str) -> None:
    modules = {module.name: module for module in adaptable(network)}
    absent = sorted(set(adapter.weights) - set(modules))
    if absent:
        others = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise TargetModuleError(
            f"{adapter.folder}: expected every module of the adapter to be a linear layer or the embeddings of "
            f"the base model {base}, found that {absent[0]}{others} is not; name the model it was trained on with "
            "--base"
        )
    _check_extras(network, adapter, base)
    _check_base_weights(network, adapter, base)
    for name, (a_KR, b_RN) in adapter.weights.items():
        experts, wanted = modules[name].num_experts, (modules[name].in_features, modules[name].out_features)
        found = (a_KR.shape[-2], b_RN.shape[-1])
        are_as_many = a_KR.shape[:-2] == b_RN.shape[:-2] == (() if experts is None else (experts,))
        if wanted != found or a_KR.shape[-1] != b_RN.shape[-2] or not are_as_many:
            raise TargetModuleError(
                f"{adapter.folder}: expected an adapter for {name} of the base model {base}, {wanted[0]} × "
                f"{wanted[1]}, found one of shapes {tuple(a_KR.shape)} and {tuple(b_RN.shape)}; name the model it was "
                "trained on with --base"
            )


def _check_extras(network: PreTrainedModel, adapter: SavedAdapter, base: str) -> None:
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
                f"{adapter.folder}: expected magnitudes of linear layers, biases of these and of LayerNorm, the output "
                f"head and the embeddings of the base model {base}, found {name}, {found}; name the model it was "
                "trained on with --base, or evaluate it with PEFT"
            )


def _check_base_weights(network: PreTrainedModel, adapter: SavedAdapter, base: str) -> None:
    """What PEFT saved of the base model, and would put in its place, is what the base model has."""
    for name, saved in adapter.base_weights.items():
        held = initial_values(network, [ExtraTensor(name=name, shape=tuple(saved.shape))])[name].cpu()
        if not torch.equal(held, saved.to(held.dtype)):
            raise TargetModuleError(
                f"{adapter.folder}: expected {name}, which PEFT saved beside the adapter, to be that of the base model "
                f"{base}, found that of another base model, or one that was trained or resized; name the model it was "
                "trained on with --base, or evaluate it with PEFT"
            )
