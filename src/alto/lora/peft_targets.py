"""Naming of modules in ``adapter_config.json``, so that PEFT puts the adapter on exactly these modules.

PEFT matches a name in ``target_modules`` with every module that has this full name or ends in it. For a mixture whose
experts transformers 5 stores as stacked parameters, PEFT first interprets names such as ``gate_proj``, alone or at the
end of a full name, as the experts of the model in transformers 4, and puts adapters on the stacked parameters instead.
A dense layer or a shared expert with such a name can be reached only through ``target_parameters``, which holds full
names of weights and is not translated. The adapter's tensors keep their names, so other programs still find them.
Source: PEFT 0.21, ``peft/utils/transformers_weight_conversion.py`` and ``BaseTuner._inject_parameters``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel, conversion_mapping
from transformers.pytorch_utils import Conv1D

from alto.lora.targets import adaptable, linear_bases, module_names, router_bases

__all__ = [
    "ModuleNames",
    "PeftTargets",
    "expert_kind",
    "expert_names",
    "expert_names_of",
    "peft_targets",
    "wrapper_names",
]

_EXPERT_NAMES: Mapping[str, Mapping[str, str]] = {
    "mixtral": {"gate": "gate.weight", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"},
    "qwen2_moe": {
        "gate": "gate.weight",
        "gate_proj": "gate_up_proj",
        "up_proj": "gate_up_proj",
        "down_proj": "down_proj",
    },
}
"""By kind of mixture: names that PEFT interprets as the router or the experts, and the parameter that each has
become."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNames:
    """The names of a model that PEFT matches targets with.

    Attributes:
        modules: Full names of all modules of the model, linear or not.
        model_type: ``model_type`` in the model's config.
        transposed: Full names of modules that store their weight transposed (``Conv1D``).
        routers: Full names of routers that hold their weight directly.
        embeddings: Full names of modules whose matrices PEFT names as those of embeddings.
    """

    modules: frozenset[str]
    model_type: str
    transposed: frozenset[str] = frozenset()
    routers: frozenset[str] = frozenset()
    embeddings: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModuleNames:
        """Return the names of ``model``, with or without injected adapters."""
        transposed = (name for name, module in linear_bases(model).items() if isinstance(module, Conv1D))
        return cls(
            modules=frozenset(module_names(model)),
            model_type=model.config.model_type,
            transposed=frozenset(transposed),
            routers=frozenset(router_bases(model)),
            embeddings=frozenset(module.name for module in adaptable(model) if module.is_embedding),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftTargets:
    """``target_modules`` and ``target_parameters`` of an ``adapter_config.json``."""

    modules: list[str]
    parameters: list[str]


def expert_kind(model_type: str) -> str | None:
    """Return transformers' name for the checkpoint layout of the experts of this model type; None if it has none."""
    kinds = {"mixtral": "mixtral"} | conversion_mapping._MODEL_TO_CONVERSION_PATTERN
    return kinds.get(model_type)


def expert_names(model_type: str) -> Mapping[str, str]:
    """Return the names that PEFT interprets as experts of this model type, and the parameter that each stands for;
    empty for most types."""
    return _EXPERT_NAMES.get(expert_kind(model_type) or "", {})


def wrapper_names(parameters: Collection[str]) -> dict[str, str]:
    """Return the name of PEFT's wrapper module for each parameter of experts.

    If a module has several parameters, PEFT wraps the first one first, so its wrapper is the innermost.

    Args:
        parameters: Full names, in the model's order.
    """
    by_owner: dict[str, list[str]] = {}
    for name in parameters:
        by_owner.setdefault(name.rpartition(".")[0], []).append(name)
    return {
        name: owner + ".base_layer" * (len(names) - 1 - index)
        for owner, names in by_owner.items()
        for index, name in enumerate(names)
    }


def expert_names_of(modules: Collection[str], target_parameters: Collection[str]) -> dict[str, str]:
    """Return the parameters of experts that PEFT's modules stand for: the inverse of :func:`wrapper_names`.

    Args:
        modules: PEFT's module names of an adapter, without the prefix of PEFT's own model.
        target_parameters: ``target_parameters`` in its ``adapter_config.json``: full names, or endings.
    """
    found: dict[str, str] = {}
    for owner in {module.replace(".base_layer", "") for module in modules}:
        keys = {
            target.rpartition(".")[2]
            for target in target_parameters
            if f".{owner}".endswith(f".{target.rpartition('.')[0]}") and target.rpartition(".")[2] != "weight"
        }
        names = [f"{owner}.{key}" for key in sorted(keys, key=lambda key: (key == "down_proj", key))]
        found |= {module: name for name, module in wrapper_names(names).items()}
    return {module: name for module, name in found.items() if module in modules}


def peft_targets(adapted: Collection[str], model: ModuleNames, *, experts: Collection[str] = ()) -> PeftTargets:
    """Return targets with which PEFT adapts exactly the modules in ``adapted``.

    Modules are named by the last part of their names if that matches no others, and by full names otherwise.

    Args:
        adapted: Full names of linear modules and of parameters of experts.
        model: Names of the model's modules.
        experts: The names in ``adapted`` that are parameters of experts.
    """
    adapted = [name for name in adapted if name not in experts]
    translated = expert_names(model.model_type)
    by_parameter = {name for name in adapted if _leaf(name) in translated or name in model.routers}
    by_name = set(adapted) - by_parameter
    leaves = set(map(_leaf, by_name))
    meant = {name for name in model.modules if _leaf(name) in leaves}
    return PeftTargets(
        modules=sorted(leaves if meant == by_name else by_name),
        parameters=[*sorted(f"{name}.weight" for name in by_parameter), *experts],
    )


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]
