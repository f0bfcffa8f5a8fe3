"""Checks a base model that the user passes as an object, and restores it after training.

Training wraps modules, replaces the attention, sets patterns and flags on modules, and freezes parameters. All of these
changes are in the attributes of modules, of their configurations and of parameters. The attributes are saved before
training and restored after it. The weights themselves are never changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from alto.backbone.memory import release_memory
from alto.backbone.sharding import is_sharded
from alto.errors import ModelError, RunBusyError, UnsupportedError
from alto.spec import BaseObjects

_IN_USE = "_alto_in_use"

_NAME_IT = "or name the model by its id or its folder, which ALTO loads itself"


@contextlib.contextmanager
def borrowed(objects: BaseObjects, device: torch.device) -> Iterator[None]:
    """Allow changes of the model inside the context, and undo them when it ends, also after an error.

    Modules, their attributes and configurations, and ``requires_grad`` of parameters are restored. The tokenizer is not
    changed.

    Args:
        objects: The model, without adapters of any kind, and its tokenizer.

    Raises:
        ModelError: The model is not one of transformers, or the tokenizer does not fit it.
        UnsupportedError: The model is on another device, quantised, sharded, or has adapters of PEFT.
        RunBusyError: Another task of this process trains on the model.
    """
    model = objects.model
    _check(objects, device)
    modules = [(module, _noted(module)) for module in model.modules()]
    configs = [(config, dict(vars(config))) for config in _configs(model)]
    parameters = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    vars(model)[_IN_USE] = True
    if getattr(model, "_require_grads_hooks", None):
        model.disable_input_require_grads()  # a frozen base needs no gradient of its inputs
    try:
        yield
    finally:
        for module, noted in modules:
            _put_back(module, noted)
        for config, values in configs:
            vars(config).clear()
            vars(config).update(values)
        for parameter, requires_grad in parameters:
            parameter.requires_grad_(requires_grad)
        release_memory()


def _noted(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return the attributes of ``module``, and a copy of each one that is a mapping: submodules, parameters, hooks."""
    return {name: (value, dict(value) if isinstance(value, dict) else None) for name, value in vars(module).items()}


def _put_back(module: nn.Module, noted: dict[str, tuple[Any, Any]]) -> None:
    for value, entries in noted.values():
        if entries is not None:  # keep the mapping itself: handles of hooks refer to it
            value.clear()
            value.update(entries)
    vars(module).clear()
    vars(module).update({name: value for name, (value, _) in noted.items()})


def _configs(model: PreTrainedModel) -> list[Any]:
    """Return all configurations of ``model`` and of its parts, each once."""
    found: dict[int, Any] = {}
    names = ("config", "generation_config")
    waiting: list[Any] = [vars(module).get(name) for module in model.modules() for name in names]
    while waiting:
        config = waiting.pop()
        if config is None or id(config) in found or not hasattr(config, "__dict__"):
            continue
        found[id(config)] = config
        waiting += [vars(config).get(name) for name in getattr(config, "sub_configs", ())]
    return list(found.values())


def _check(objects: BaseObjects, device: torch.device) -> None:
    model, tokenizer, name = objects.model, objects.tokenizer, objects.name
    adapters = {type(module).__name__ for module in _modules(model) if type(module).__module__.split(".")[0] == "peft"}
    if adapters:
        raise UnsupportedError(
            f"model: expected a base model without adapters, found modules of PEFT ({', '.join(sorted(adapters)[:3])}) "
            f"in {name}; give model.unload(), or model.merge_and_unload() to train on top of its adapter"
        )
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"model: expected a transformers.PreTrainedModel, found {type(model).__name__}; give the model itself, "
            f"{_NAME_IT}"
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ModelError(
            f"tokenizer: expected a tokenizer of transformers, found {type(tokenizer).__name__}; give the tokenizer "
            "itself (of a processor: processor.tokenizer)"
        )
    if vars(model).get(_IN_USE):
        raise RunBusyError(f"model: expected that no other task trains on {name}, found one; wait until it has ended")
    _check_weights(model, name, device)
    _check_vocabulary(model, tokenizer, name)


def _modules(model: Any) -> Iterator[nn.Module]:
    return model.modules() if isinstance(model, nn.Module) else iter(())


def _check_weights(model: PreTrainedModel, name: str, device: torch.device) -> None:
    if any(is_sharded(module) for module in model.modules()) or any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    ):
        raise UnsupportedError(
            f"model: expected a model that is completely in this process, found {name} sharded over several processes; "
            "name it by its id with 'num_gpus', and ALTO shards it"
        )
    if getattr(model, "hf_quantizer", None) is not None or hasattr(model.config, "quantization_config"):
        raise UnsupportedError(
            f"model: expected an object whose weights are not quantised, found {name} quantised; name the model by its "
            "id, with 'load_in_4bit: true' or 'load_in_8bit: true'"
        )
    hooks = [module for module in model.modules() if hasattr(module, "_hf_hook")]
    if hooks:
        raise UnsupportedError(
            f"model: expected a model on one device, found {name} with hooks of accelerate, which move weights or "
            f"activations; load it without device_map, {_NAME_IT}"
        )
    places = sorted({str(tensor.device) for tensor in (*model.parameters(), *model.buffers())})
    wanted = torch.empty(0, device=device).device  # "cuda" becomes the current GPU
    if places != [str(wanted)]:
        raise UnsupportedError(
            f"model: expected all weights on {wanted}, where this engine trains, found {name} on "
            f"{' and '.join(places)}; move it with model.to({str(wanted)!r}), {_NAME_IT}"
        )


def _check_vocabulary(model: PreTrainedModel, tokenizer: Any, name: str) -> None:
    embeddings: Any = model.get_input_embeddings()
    num_rows, num_tokens = getattr(embeddings, "num_embeddings", None), len(tokenizer)
    if num_rows is not None and num_tokens > num_rows:
        raise ModelError(
            f"tokenizer: expected at most {num_rows} tokens, the rows of the embeddings of {name}, found {num_tokens}; "
            "give the model's own tokenizer, or add rows with model.resize_token_embeddings(len(tokenizer))"
        )
