"""The modules of a model that adapters can target, and those that ``target_modules`` selects, by PEFT's rules."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from alto.errors import TargetModuleError
from alto.lora.experts import MultiLoraExperts, expert_parameters, is_adaptable
from alto.lora.layout import TargetModule
from alto.lora.linear import FrozenLinear, MultiLoraLinear
from alto.lora.routers import MultiLoraRouter
from alto.spec.job_config import ALL_LINEAR

__all__ = [
    "adaptable",
    "expert_bases",
    "find_targets",
    "linear_bases",
    "linear_modules",
    "module_names",
    "router_bases",
]

_LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("falcon_h1", "mamba2", "nemotron_h"), ("out_proj",)),
    **dict.fromkeys(("falcon_mamba", "mamba"), ("out_proj", "dt_proj")),
    "jamba": ("dt_proj",),
    "inkling2_text": ("weight_proj",),
}
"""By model type, the last part of the names of layers that get no adapter: their weight is read by the model, or by a
fused kernel, itself; or (Inkling 2) transformers 5.23 renames the adapter's tensors when PEFT loads them.

Source: PEFT 0.21, ``_check_lora_target_modules_mamba``; and transformers' forward passes for ``dt_proj``."""


def linear_modules(model: PreTrainedModel) -> tuple[TargetModule, ...]:
    """All linear modules of a causal LM but its output head, in the model's order (PEFT's ``all-linear``).

    The same whether or not adapters have been injected. Left out are those of ``_LEFT_OUT``, such as projections of
    Mamba's layers whose weight is read elsewhere than in the layer, so that an adapter there would not apply; and the
    towers of a vision-language model, which rows of text never reach.
    """
    return tuple(
        TargetModule(name=name, in_features=_sizes(module)[0], out_features=_sizes(module)[1])
        for name, module in linear_bases(model).items()
    )


def linear_bases(model: PreTrainedModel) -> dict[str, FrozenLinear]:
    """The modules that :func:`linear_modules` names, as they are without injection."""
    head = model.get_output_embeddings()
    left_out = _LEFT_OUT.get(model.config.model_type, ())
    return {
        name: module
        for name, module in _modules(model).items()
        if isinstance(module, nn.Linear | Conv1D)
        and module is not head
        and name.rsplit(".", 1)[-1] not in left_out
        and name.startswith(_language_part(model))
    }


def _language_part(model: PreTrainedModel) -> str:
    """The beginning of the names of the layers that rows of text reach: of a vision-language model those of its
    language model, of others all."""
    if "vision_config" not in getattr(model.config, "sub_configs", ()):
        return ""
    names = (name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] == "language_model")
    return next((f"{name}." for name in names), "")


def expert_bases(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules of ``model`` with stacked experts that may have adapters, as they are without injection."""
    return {name: module for name, module in _modules(model).items() if is_adaptable(module)}


def router_bases(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules beside stacked experts that hold the weight of a router themselves, as they are without injection."""
    blocks = {name.rpartition(".")[0] for name in expert_bases(model)}
    return {
        name: module
        for name, module in _modules(model).items()
        if name.rpartition(".")[0] in blocks and _is_router(module)
    }


def _is_router(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 2 and not isinstance(module, nn.Linear | Conv1D | nn.Embedding)


def adaptable(model: PreTrainedModel) -> tuple[TargetModule, ...]:
    """All that may have adapters: linear modules, then routers, then parameters of experts, each in the model's
    order."""
    routers = (
        TargetModule(name=name, in_features=weight.shape[1], out_features=weight.shape[0], is_router=True)
        for name, module in router_bases(model).items()
        if (weight := module._parameters["weight"]) is not None
    )
    experts = (
        parameter for name, module in expert_bases(model).items() for parameter in expert_parameters(module, name)
    )
    return (*linear_modules(model), *routers, *experts)


def _sizes(module: FrozenLinear) -> tuple[int, int]:
    """In-features and out-features."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    num_in, num_out = module.weight.shape
    return num_in, num_out


def module_names(model: PreTrainedModel) -> tuple[str, ...]:
    """Full names of all modules below the model, linear or not; the same whether or not adapters have been injected."""
    return tuple(_modules(model))


def find_targets(
    model: PreTrainedModel, target_modules: str | Sequence[str], rank: int, target_parameters: Sequence[str] = ()
) -> tuple[TargetModule, ...]:
    """The modules that ``target_modules`` selects, in the model's order, and after them those of routers and experts.

    Args:
        target_modules: ``"all-linear"``; or names, each a full one or an ending such as ``q_proj``; or, as another
            string, a regular expression that has to match full names as a whole.
        rank: Rank the adapter is to have.
        target_parameters: Names of parameters of experts and routers, each a full one or an ending such as
            ``experts.gate_up_proj`` or ``gate.weight``.

    Raises:
        TargetModuleError: The model has no linear modules, a name or the expression matches none of them or other
            modules too, or the rank exceeds the smaller side of a module; or the model has no such parameters.
    """
    experts = _find_experts(model, target_parameters)
    if target_parameters and not target_modules:
        _check_rank(experts, rank)
        return experts
    linear = {module.name: module for module in linear_modules(model)}
    if not linear:
        raise TargetModuleError(
            "target_modules: expected a base model built of torch.nn.Linear modules, found none besides its output "
            "head; use another base model"
        )
    if target_modules == ALL_LINEAR:
        found = set(linear)
    elif isinstance(target_modules, str):
        found = _meant(model, linear, target_modules, _fullmatch)
    else:
        found = set().union(*(_meant(model, linear, name, _is_name_or_ending) for name in target_modules))
    targets = (*(module for name, module in linear.items() if name in found), *experts)
    _check_rank(targets, rank)
    return targets


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


def _meant(
    model: PreTrainedModel, linear: Mapping[str, TargetModule], text: str, matches: Callable[[str, str], bool]
) -> set[str]:
    modules = _modules(model)
    found = {name for name in modules if matches(text, name)}
    if not found & set(linear):
        leaves = sorted({name.rsplit(".", 1)[-1] for name in linear})
        near = difflib.get_close_matches(text, leaves, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        example = next(iter(linear))
        raise TargetModuleError(
            f"target_modules: expected to find linear modules of the model, found none under {text!r}; {hint}"
            f"the model has {', '.join(leaves)}, a full name is {example!r} (or write {ALL_LINEAR!r})"
        )
    for name in sorted(found - set(linear)):
        is_head = modules[name] is model.get_output_embeddings()
        kind = "its output head" if is_head else f"a {type(modules[name]).__name__}"
        raise TargetModuleError(
            f"target_modules: expected only linear modules of the model's body, found that {text!r} also matches "
            f"{name!r}, {kind}; narrow it"
        )
    return found


def _fullmatch(pattern: str, name: str) -> bool:
    return re.fullmatch(pattern, name) is not None


def _is_name_or_ending(text: str, name: str) -> bool:
    return name == text or name.endswith("." + text)


def _check_rank(targets: Sequence[TargetModule], rank: int) -> None:
    for module in targets:
        limit = min(module.in_features, module.out_features)
        if rank > limit:
            raise TargetModuleError(
                f"r: expected at most {limit}, the smaller side of {module.name} "
                f"({module.in_features} × {module.out_features}), found {rank}; lower r or leave the module out"
            )


def _modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """All modules below the model by name, as they are without injection."""
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        if name:
            is_wrapped = isinstance(module, MultiLoraLinear | MultiLoraExperts | MultiLoraRouter)
            names.setdefault(module.base if is_wrapped else module, name)
    return {name: module for module, name in names.items()}
