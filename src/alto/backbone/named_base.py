"""Checks whether a model that is given as an object equals the model that its name loads.

If so, a run on the object counts as a run on the name: any process can resume it, and PEFT and vLLM load its adapter.
The comparison covers everything that decides the forward pass and the tokens: the classes of the model and its modules,
their plain attributes, the configuration, every number of every weight, and the tokenizer. Only files on this machine
are read; nothing is downloaded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from alto.backbone.fingerprint import model_folder, named_tensors, weight_files
from alto.backbone.load import load_config, load_network, load_tokenizer, resolve_model
from alto.backbone.reading import auto_class, reading
from alto.backbone.sharded_load import parameters_on_meta
from alto.errors import ModelError
from alto.spec import BaseModelSpec, BaseObjects


def build_skeleton(spec: BaseModelSpec) -> PreTrainedModel:
    """Build the modules of a base model; weights are not read and take no memory. Return a model given as an object
    itself.

    Raises:
        ModelNotFoundError: There is no model of that name, or its configuration is missing.
        ModelError: Its configuration is not that of a causal LM, or needs ``trust_remote_code``.
    """
    if spec.objects is not None:
        return load_network(spec)
    config, path = load_config(spec), resolve_model(spec.id)
    what = "config.json of a causal language model"
    with reading(spec.id, path, what, "use a base model that transformers supports"), parameters_on_meta():
        network: PreTrainedModel = auto_class(config).from_config(config, trust_remote_code=spec.trust_remote_code)
    return network.requires_grad_(False)


_DTYPES = {torch.float32, torch.bfloat16, torch.float16}

_OF_THE_FILE = {"transformers_version", "architectures", "dtype", "torch_dtype"}
"""Configuration keys for the origin of the model, and for the precision, which is compared separately."""

_OF_USE = {"use_cache", "output_attentions", "output_hidden_states", "return_dict", "pad_token_id"}
"""Configuration keys that do not change the results of a training step."""

_FLAGS = ("training", "gradient_checkpointing", "name_or_path")
"""Attributes of modules that training sets itself, and the origin of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedBase:
    """The settings that load the same base model.

    Attributes:
        chat_template: The object's chat template if that of the named tokenizer differs; else None.
    """

    model: str
    dtype: str
    chat_template: str | None


def find_named_base(objects: BaseObjects) -> NamedBase | None:
    """Return the settings that load the same model and tokenizer as ``objects``; None if there are none, or if equality
    cannot be shown.

    Args:
        objects: The model without adapters, before training has set hooks or attributes on it, and its tokenizer.
    """
    model: PreTrainedModel = objects.model
    name = model.name_or_path
    if not isinstance(name, str) or not name:
        return None
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if len(dtypes) != 1 or not dtypes <= _DTYPES:
        return None
    try:
        folder = model_folder(name, local_files_only=True)
    except (OSError, ValueError):  # not a hub id, or never downloaded
        return None
    try:
        if not _is_same_network(model, BaseModelSpec(id=str(folder))):
            return None
        tokenizer = load_tokenizer(BaseModelSpec(id=str(folder)))
    except ModelError:  # the name loads no model of this kind
        return None
    if not _are_same_tokens(objects.tokenizer, tokenizer) or not _are_same_weights(model, folder):
        return None
    template, named = objects.tokenizer.chat_template, tokenizer.chat_template
    if template != named and not isinstance(template, str):
        return None
    is_folder = Path(name).expanduser().is_dir()
    return NamedBase(
        model=resolve_model(name) if is_folder else name,
        dtype=objects.dtype,
        chat_template=None if template == named else template,
    )


def _is_same_network(model: PreTrainedModel, spec: BaseModelSpec) -> bool:
    if not type(model).__module__.startswith("transformers."):
        return False  # code that came with the model
    if _plain_config(load_config(spec)) != _plain_config(model.config):
        return False
    own, named = list(model.named_modules()), list(build_skeleton(spec).named_modules())
    return len(own) == len(named) and all(
        name == other_name and _is_same_module(module, other)
        for (name, module), (other_name, other) in zip(own, named, strict=True)
    )


def _plain_config(config: PreTrainedConfig) -> str:
    values = _without(json.loads(config.to_json_string(use_diff=False)))
    return json.dumps(values, sort_keys=True)


def _without(value: Any) -> Any:
    """Return ``value`` without irrelevant keys, at any depth: configurations contain other configurations."""
    if not isinstance(value, dict):
        return value
    left_out = _OF_THE_FILE | _OF_USE
    return {key: _without(inner) for key, inner in value.items() if key not in left_out and not key.startswith("_")}


def _is_same_module(module: nn.Module, other: nn.Module) -> bool:
    """Return whether both modules have the same class and equal plain attributes, and ``module`` has neither hooks nor
    a ``forward`` of its own."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if type(module) is not type(other) or "forward" in vars(module) or any(hooks):
        return False
    return _plain_attributes(module) == _plain_attributes(other)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and not name.startswith("_") and name not in _FLAGS
    }


def _are_same_tokens(tokenizer: Any, named: Any) -> bool:
    """Return whether both tokenizers encode and end every text in the same way; the padding token does not matter."""
    if not (hasattr(tokenizer, "backend_tokenizer") and hasattr(named, "backend_tokenizer")):
        return False
    ends = ("bos_token_id", "eos_token_id")
    if any(getattr(tokenizer, end) != getattr(named, end) for end in ends):
        return False
    own, other = (json.loads(one.backend_tokenizer.to_str()) for one in (tokenizer, named))
    for values in (own, other):
        values.pop("truncation", None)
        values.pop("padding", None)
    return bool(own == other)


@torch.no_grad()
def _are_same_weights(model: PreTrainedModel, folder: Path) -> bool:
    """Return whether the files hold every weight of ``model``, exactly equal after conversion to its precision."""
    left: dict[str, Tensor] = named_tensors(model)
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # not a mapping
                own = left.get(name)
                if own is None:  # a tied weight, or one that the class does not have
                    continue
                stored = opened.get_tensor(name)
                if stored.shape != own.shape or not torch.equal(stored.to(own.dtype).to(own.device), own):
                    return False
                del left[name]
    return not left
