"""Naming of modules in ``adapter_config.json``, so that PEFT puts the adapter on exactly these modules.

PEFT matches a name in ``target_modules`` with every module that has this full name or ends in it. For a mixture whose
experts transformers 5 stores as stacked parameters, PEFT first interprets names such as ``gate_proj``, alone or at the
end of a full name, as the experts of the model in transformers 4, and puts adapters on the stacked parameters instead.
A dense layer or a shared expert with such a name can be reached only through ``target_parameters``, which holds full
names of weights and is not translated. The adapter's tensors keep their names, so other programs still find them.
Source: PEFT 0.21, ``peft/utils/transformers_weight_conversion.py`` and ``BaseTuner._inject_parameters``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel, conversion_mapping
from transformers.pytorch_utils import Conv1D

from alto.lora.targets import adaptable, linear_bases, linear_modules, module_names, router_bases
from alto.spec import ALL_LINEAR, JobConfig

_EXPERT_NAMES: Mapping[str, Mapping[str, str]] = {
    "mixtral": {"gate": "gate.weight", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"},
    "qwen2_moe": {
        "gate": "gate.weight",
        "gate_proj": "gate_up_proj",
        "up_proj": "gate_up_proj",
        "down_proj": "down_proj",
    },
}
"""By kind of mixture: the names that PEFT interprets as the router or the experts, each with its present parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNames:
    """The names of a model that PEFT matches targets with.

    Attributes:
        modules: Full names of all modules of the model, linear or not.
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
    """Return the names that PEFT interprets as experts of this model type, each with its parameter; empty for most
    types."""
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
    """Return the parameters of experts that PEFT's modules wrap: the inverse of :func:`wrapper_names`.

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


_NUM_STACKED = 3
_MAX_SHOWN = 4


def untrained_notes(model: PreTrainedModel, configs: Iterable[JobConfig]) -> tuple[str, ...]:
    """Return notices about stacked experts and routers that are not trained although a job's targets seem to include
    them."""
    configs = list(configs)
    experts = _without_targets(_experts(model), configs)
    wide = [config for config in configs if config.target_modules == ALL_LINEAR]
    named = expert_names(model.config.model_type)
    means_experts = wide or any(_names_one_of(config.target_modules, named) for config in configs)
    if not experts or not means_experts:
        return ()
    routers = _without_targets(_routers(model, experts), configs)
    sentences = f"The experts of the base model are not trained: {_described(experts)}, stacked in parameters"
    sentences += f"; its routers are not trained either: {_described(routers)}." if routers else "."
    sentences += " Name them in target_parameters to train them."
    if wide and named:
        rank = max(config.r for config in wide)
        ours = sum(rank * (module.in_features + module.out_features) for module in linear_modules(model))
        left_out = sum(module.name.rsplit(".", 1)[-1] in named for module in linear_modules(model))
        sentences += (
            f" At r {rank}, all-linear is {ours:,} parameters here and {peft_all_linear(model, rank):,} in PEFT, which "
            "adapts experts and routers"
        )
        others = f" and leaves out {left_out:,} other linear modules that are trained here" if left_out else ""
        sentences += f"{others}."
    elif wide:
        sentences += " PEFT's all-linear leaves them out, too."
    return (sentences,)


def peft_all_linear(model: PreTrainedModel, rank: int) -> int:
    """Return the parameter count of PEFT's adapter of ``rank`` with ``target_modules="all-linear"`` (PEFT 0.21).

    If PEFT adapts stacked experts, each expert has its own matrices; gate and up in one parameter have twice the rank.
    """
    translated = expert_names(model.config.model_type)
    count = sum(
        rank * (module.in_features + module.out_features)
        for module in linear_modules(model)
        if module.name.rsplit(".", 1)[-1] not in translated
    )
    stacked = {new: [old for old in translated if translated[old] == new] for new in translated.values()}
    for name, parameter in model.named_parameters():
        name = name.replace(".base.", ".")  # below an injected layer
        for new, olds in stacked.items():
            if name.endswith(f".{new}"):
                *num_experts, rows, columns = parameter.shape
                count += len(olds) * rank * math.prod(num_experts) * (rows + columns)
    return count


def _without_targets(parameters: dict[str, int], configs: Sequence[JobConfig]) -> dict[str, int]:
    """Return the ``parameters`` that at least one job does not train."""
    return {
        name: size
        for name, size in parameters.items()
        if not all(
            any(f".{name}".endswith(f".{target}") for target in config.target_parameters or ()) for config in configs
        )
    }


def _names_one_of(target_modules: str | Sequence[str], names: Iterable[str]) -> bool:
    if isinstance(target_modules, str):
        return any(name in target_modules for name in names)
    return any(target.rsplit(".", 1)[-1] in names for target in target_modules)


def _experts(model: PreTrainedModel) -> dict[str, int]:
    """Return the sizes of all parameters that stack the matrices of several experts, by full name."""
    return {
        f"{name}.{key}": parameter.numel()
        for name, module in model.named_modules()
        if not _is_plain(module)
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == _NUM_STACKED
    }


def _routers(model: PreTrainedModel, experts: Iterable[str]) -> dict[str, int]:
    """Return the sizes of all matrices next to stacked experts that are not in a linear layer, by full name."""
    blocks = {name.rsplit(".", 2)[0] for name in experts}
    return {
        f"{name}.{key}": parameter.numel()
        for name, module in model.named_modules()
        if name.rpartition(".")[0] in blocks and not _is_plain(module)
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 2 and f"{name}.{key}" not in experts and not name.endswith("experts")
    }


def _is_plain(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D | nn.Embedding | nn.modules.conv._ConvNd)


def _described(parameters: dict[str, int]) -> str:
    """Return a text such as ``98,304 weights (mlp.experts.down_proj, mlp.experts.gate_up_proj)``."""
    kinds = sorted({".".join(name.rsplit(".", 3)[-3:]) for name in parameters})
    shown = ", ".join(kinds[:_MAX_SHOWN]) + (f" and {len(kinds) - _MAX_SHOWN} more" if len(kinds) > _MAX_SHOWN else "")
    return f"{sum(parameters.values()):,} weights ({shown})"
