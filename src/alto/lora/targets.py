"""The modules of a model that adapters can target, and their selection by ``target_modules``, following PEFT's
rules.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from alto.errors import TargetModuleError
from alto.lora.experts import expert_parameters, is_adaptable
from alto.lora.layout import TargetModule
from alto.lora.linear import FrozenLinear, InjectedModule
from alto.spec import ALL_LINEAR

_SHARED_EXPERTS = ("shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj")

_LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("falcon_h1", "mamba2", "nemotron_h"), ("out_proj",)),
    **dict.fromkeys(("falcon_mamba", "mamba"), ("out_proj", "dt_proj")),
    "jamba": ("dt_proj",),
    "inkling2_text": ("weight_proj",),
    "laguna": _SHARED_EXPERTS,
    "mistral_large4": ("mlp.gate", "mlp.experts", *_SHARED_EXPERTS),
    "unlimited_ocr": (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "mlp.gate",
        "mlp.experts",
    ),
}
"""By model type: name endings of modules that get no adapter.

In Mamba models these weights are read directly by the model or by a fused kernel (PEFT 0.21,
``_check_lora_target_modules_mamba``; transformers' forward passes for ``dt_proj``). For Inkling 2, Laguna, Mistral
Large 4 and Unlimited OCR, PEFT 0.21 looks for the adapter's tensors under other names, because transformers 5.23
renames tensors of old checkpoints.
"""


def linear_modules(model: PreTrainedModel) -> tuple[TargetModule, ...]:
    """Return all linear modules of a causal LM except its output head, in the model's order (PEFT's ``all-linear``).

    The result does not depend on injected adapters. Two kinds of modules are left out: those in ``_LEFT_OUT``, such as
    Mamba projections whose weight is read outside the layer, so that an adapter would have no effect; and the vision
    towers of a vision-language model, which text never reaches.
    """
    return tuple(
        TargetModule(name=name, in_features=_sizes(module)[0], out_features=_sizes(module)[1])
        for name, module in linear_bases(model).items()
    )


def linear_bases(model: PreTrainedModel) -> dict[str, FrozenLinear]:
    """Return the modules that :func:`linear_modules` names, by name, without injected wrappers."""
    head = head_base(model)
    return {
        name: module
        for name, module in base_modules(model).items()
        if isinstance(module, nn.Linear | Conv1D)
        and module is not head
        and not _is_left_out(model, name)
        and is_reached_by_text(model, name)
    }


def head_base(model: PreTrainedModel) -> nn.Module | None:
    """Return the output head of ``model`` without an injected wrapper; None if the model has no head."""
    head: Any = model.get_output_embeddings()
    found: nn.Module | None = head.base if isinstance(head, InjectedModule) else head
    return found


def embedding_base(model: PreTrainedModel) -> nn.Module:
    """Return the token embeddings of ``model`` without an injected wrapper."""
    embeddings: Any = model.get_input_embeddings()
    found: nn.Module = embeddings.base if isinstance(embeddings, InjectedModule) else embeddings
    return found


def _ends(model: PreTrainedModel) -> tuple[TargetModule, ...]:
    """Return the output head and the token embeddings if PEFT can adapt them, too: a linear layer, and
    ``torch.nn.Embedding``."""
    names = {module: name for name, module in base_modules(model).items()}
    head, embeddings = head_base(model), embedding_base(model)
    found = []
    if isinstance(head, nn.Linear) and head in names:
        rows, columns = head.out_features, head.in_features
        found.append(TargetModule(name=names[head], in_features=columns, out_features=rows, is_head=True))
    if isinstance(embeddings, nn.Embedding) and embeddings in names:
        rows, columns = embeddings.num_embeddings, embeddings.embedding_dim
        table = TargetModule(name=names[embeddings], in_features=rows, out_features=columns, is_embedding=True)
        found.append(table)
    return tuple(found)


def _is_left_out(model: PreTrainedModel, name: str) -> bool:
    return f".{name}".endswith(tuple(f".{ending}" for ending in _LEFT_OUT.get(model.config.model_type, ())))


def is_reached_by_text(model: PreTrainedModel, name: str) -> bool:
    """Return whether the module ``name`` processes text, that is, lies outside the towers of a vision-language
    model."""
    return name.startswith(_language_part(model))


def _language_part(model: PreTrainedModel) -> str:
    """Return the name prefix of the layers that process text: that of the language model in a vision-language model,
    otherwise empty."""
    if "vision_config" not in getattr(model.config, "sub_configs", ()):
        return ""
    names = (name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] == "language_model")
    return next((f"{name}." for name in names), "")


def expert_bases(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules of ``model`` with stacked experts that may have adapters, by name, without injected
    wrappers."""
    return {
        name: module
        for name, module in base_modules(model).items()
        if is_adaptable(module) and not _is_left_out(model, name)
    }


def router_bases(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules next to stacked experts that hold a router's weight directly, by name, without injected
    wrappers."""
    blocks = {name.rpartition(".")[0] for name in expert_bases(model)}
    return {
        name: module
        for name, module in base_modules(model).items()
        if name.rpartition(".")[0] in blocks and _is_router(module)
    }


def _is_router(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 2 and not isinstance(module, nn.Linear | Conv1D | nn.Embedding)


def adaptable(model: PreTrainedModel) -> tuple[TargetModule, ...]:
    """Return everything that may have adapters: linear modules, then routers, then parameters of experts, each in the
    model's order, then the output head and the embeddings."""
    routers = (
        TargetModule(name=name, in_features=weight.shape[1], out_features=weight.shape[0], is_router=True)
        for name, module in router_bases(model).items()
        if (weight := module._parameters["weight"]) is not None
    )
    experts = (
        parameter for name, module in expert_bases(model).items() for parameter in expert_parameters(module, name)
    )
    return (*linear_modules(model), *routers, *experts, *_ends(model))


def _sizes(module: FrozenLinear) -> tuple[int, int]:
    """Return in-features and out-features."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    num_in, num_out = module.weight.shape
    return num_in, num_out


def module_names(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the full names of all modules below the model, linear or not; injected adapters do not change the
    result."""
    return tuple(base_modules(model))


def find_targets(
    model: PreTrainedModel,
    target_modules: str | Sequence[str],
    *,
    target_parameters: Sequence[str] = (),
    exclude_modules: str | Sequence[str] | None = None,
    layers_to_transform: Sequence[int] | None = None,
    layers_pattern: Sequence[str] | None = None,
) -> tuple[TargetModule, ...]:
    """Return the modules that the settings select, in the order of :func:`adaptable`.

    Args:
        target_modules: ``"all-linear"``, which leaves out head and embeddings; a list of names, each a full name or an
            ending such as ``q_proj``; or a regular expression that must match full names entirely.
        target_parameters: Names of parameters of experts and routers, each a full name or an ending such as
            ``experts.gate_up_proj`` or ``gate.weight``.
        exclude_modules: Names, or a regular expression, of modules to leave out.
        layers_to_transform: Indices of the layers to adapt. Modules of other layers are left out, unless their full
            name is in ``target_modules``. With ``"all-linear"``, a combination that PEFT does not support, all linear
            modules of these layers are selected.
        layers_pattern: Regular expressions for the name that precedes the layer index; None accepts any name.

    Raises:
        TargetModuleError: The model has no linear modules; a name or an expression matches none of them, or also
            matches other modules; a layer has none of the modules; or no module is left.
    """
    experts = _find_experts(model, target_parameters)
    if target_parameters and not target_modules:
        return experts
    linear = {module.name: module for module in linear_modules(model)}
    if not linear:
        raise TargetModuleError(
            "target_modules: expected a base model with linear modules that PEFT adapts as well, found none besides "
            "its output head; use another base model"
        )
    known = linear | {end.name: end for end in _ends(model)}
    excluded = _excluded(model, exclude_modules)
    if target_modules == ALL_LINEAR:
        selected = set(linear)
    elif isinstance(target_modules, str):
        selected = _matching_modules(model, known, target_modules, _fullmatch, excluded)
    else:
        selected = set().union(
            *(_matching_modules(model, known, name, _is_name_or_ending, excluded) for name in target_modules)
        )
    selected -= excluded
    if layers_to_transform is not None:
        in_full = set() if isinstance(target_modules, str) else selected & set(target_modules)
        selected = in_full | _of_layers(selected - in_full, layers_to_transform, layers_pattern)
    if not selected:
        raise TargetModuleError(
            "target_modules: expected modules to train, found that exclude_modules and layers_to_transform leave none; "
            "change one of them"
        )
    chosen = [module for name, module in known.items() if name in selected]
    return (*(m for m in chosen if m.is_in_body), *experts, *(m for m in chosen if not m.is_in_body))


def _excluded(model: PreTrainedModel, exclude_modules: str | Sequence[str] | None) -> set[str]:
    """Return the names of the modules to leave out.

    Source: PEFT 0.21, ``check_target_module_exists``, which only warns if a name excludes nothing.
    """
    if exclude_modules is None:
        return set()
    names, excluded = module_names(model), set()
    is_pattern = isinstance(exclude_modules, str)
    for text in [exclude_modules] if isinstance(exclude_modules, str) else exclude_modules:
        matched = {name for name in names if (_fullmatch if is_pattern else _is_name_or_ending)(text, name)}
        if not matched:
            leaves = sorted({name.rsplit(".", 1)[-1] for name in linear_bases(model)})
            raise TargetModuleError(
                f"exclude_modules: expected to find modules of the model, found none under {text!r}; the model has "
                f"{', '.join(leaves)}; correct the name, or remove it"
            )
        excluded |= matched
    return excluded


def _of_layers(names: Iterable[str], indices: Sequence[int], parents: Sequence[str] | None) -> set[str]:
    """Return the ``names`` that lie in the layers with these indices. The first number in a name is its layer index.

    Source: PEFT 0.21, ``check_target_module_exists``.
    """
    patterns = (
        [r".*?\.[^.]*\.(?P<idx>\d+)\."] if parents is None else [rf"(?:^|.*?\.){p}\.(?P<idx>\d+)\." for p in parents]
    )
    layer_of: dict[str, int] = {}
    for name in names:
        match = next(filter(None, (re.match(pattern, name) for pattern in patterns)), None)
        if match is not None:
            layer_of[name] = int(match["idx"])
    absent = sorted(set(indices) - set(layer_of.values()))
    if absent:
        known = f"0 to {max(layer_of.values())}" if layer_of else "none"
        where = "" if parents is None else f" under {', '.join(parents)}"
        raise TargetModuleError(
            f"layers_to_transform: expected layers of the model with targeted modules{where} ({known}), found "
            f"{absent[0]}; correct the index, or layers_pattern"
        )
    return {name for name, index in layer_of.items() if index in indices}


def _find_experts(model: PreTrainedModel, names: Sequence[str]) -> tuple[TargetModule, ...]:
    known = {
        f"{target.name}.weight" if target.is_router else target.name: target
        for target in adaptable(model)
        if target.num_experts or target.is_router
    }
    for name in names:
        if not any(_is_name_or_ending(name, parameter) for parameter in known):
            shown = sorted({".".join(parameter.rsplit(".", 2)[-2:]) for parameter in known})
            found = f"the model has {', '.join(shown)}" if shown else "the model has none that ALTO can adapt"
            raise TargetModuleError(
                f"target_parameters: expected parameters of stacked experts or their routers, found none under "
                f"{name!r}; {found}"
            )
    return tuple(
        target for parameter, target in known.items() if any(_is_name_or_ending(name, parameter) for name in names)
    )


def _matching_modules(
    model: PreTrainedModel,
    known: Mapping[str, TargetModule],
    text: str,
    matches: Callable[[str, str], bool],
    excluded: Set[str],
) -> set[str]:
    modules = base_modules(model)
    found = {name for name in modules if matches(text, name)}
    if not found & set(known):
        kinds = sorted({(not module.is_in_body, name.rsplit(".", 1)[-1]) for name, module in known.items()})
        leaves = [leaf for _, leaf in kinds]
        near = difflib.get_close_matches(text, leaves, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        example = next(iter(known))
        raise TargetModuleError(
            f"target_modules: expected to find linear modules of the model, found none under {text!r}; {hint}"
            f"the model has {', '.join(leaves)}, a full name is {example!r} (or use {ALL_LINEAR!r})"
        )
    for name in sorted(found - set(known) - excluded):
        raise TargetModuleError(
            f"target_modules: expected only linear modules and the embeddings of the model, found that {text!r} also "
            f"matches {name!r}, a {type(modules[name]).__name__}; narrow it"
        )
    return found


def _fullmatch(pattern: str, name: str) -> bool:
    return re.fullmatch(pattern, name) is not None


def _is_name_or_ending(text: str, name: str) -> bool:
    return name == text or name.endswith("." + text)


def base_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return all modules below the model by name, without injected wrappers."""
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        if name:
            names.setdefault(module.base if isinstance(module, InjectedModule) else module, name)
    return {name: module for module, name in names.items()}


# PEFT's default target modules by architecture, used if a configuration names none.
#
# Source: PEFT 0.21, ``TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING``, and ``LoraModel._prepare_adapter_config``.

DEFAULT_TARGETS: Mapping[str, str | tuple[str, ...]] = {
    **dict.fromkeys(("bart", "gpt_neo", "gptj", "opt", "stablelm"), ("q_proj", "v_proj")),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "llama", "llama4"), ("q_proj", "v_proj")),
    **dict.fromkeys(("mistral", "mixtral", "qwen2", "qwen3"), ("q_proj", "v_proj")),
    **dict.fromkeys(("RefinedWeb", "RefinedWebModel", "bloom", "chatglm", "falcon"), ("query_key_value",)),
    "gpt_neox": ("query_key_value",),
    **dict.fromkeys(("bert", "electra", "layoutlm", "roberta", "xlm-roberta"), ("query", "value")),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn",)),
    **dict.fromkeys(("mt5", "t5"), ("q", "v")),
    "blip-2": ("q", "v", "q_proj", "v_proj"),
    "btlm": ("c_proj", "c_attn"),
    "codegen": ("qkv_proj",),
    "deberta": ("in_proj",),
    "deberta-v2": ("query_proj", "value_proj"),
    "gemma4": r".*language_model\..*\.(q_proj|v_proj)",
    "mpt": ("Wqkv",),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    "rwkv": ("key", "value", "receptance", "output"),
    "rwkv7": ("r_proj", "k_proj", "v_proj", "o_proj", "key", "value"),
}
"""By model type: names, or a regular expression."""


def default_targets(model_type: str, *, has_parameters: bool = False) -> str | tuple[str, ...]:
    """Return the ``target_modules`` that PEFT chooses for models of ``model_type``.

    Args:
        has_parameters: Whether ``target_parameters`` is set; if PEFT has no default, it then trains only these
            parameters.

    Raises:
        TargetModuleError: PEFT has no default for this model type.
    """
    found = DEFAULT_TARGETS.get(model_type, () if has_parameters else None)
    if found is None:
        raise TargetModuleError(
            "target_modules: expected a model type with default modules in PEFT, found "
            f"{model_type!r}, which has none; name the modules in target_modules, or use 'all-linear'"
        )
    return found


def find_shared_inputs(model: PreTrainedModel, forward: Callable[[], object]) -> tuple[tuple[str, ...], ...]:
    """Return groups of names of modules that received the same tensor object, each in the model's order.

    Modules that share their input with no other module are left out.

    Args:
        forward: Runs a forward pass of ``model``, outside of any training pass.
    """
    readers: dict[int, list[str]] = {}
    inputs: list[Tensor] = []  # kept alive, so that no two tensors get the same id

    def watch(name: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs.append(args[0])
        names = readers.setdefault(id(args[0]), [])
        if name not in names:
            names.append(name)

    bases = linear_bases(model)
    hooks = [base.register_forward_pre_hook(partial(watch, name)) for name, base in bases.items()]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    order = {name: number for number, name in enumerate(bases)}
    shared = (tuple(sorted(names, key=order.__getitem__)) for names in readers.values() if len(names) > 1)
    return tuple(sorted(shared, key=lambda names: order[names[0]]))
