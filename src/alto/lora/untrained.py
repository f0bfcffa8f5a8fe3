"""Notices about the parts of a mixture of experts that adapters do not train although PEFT's adapters might."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from alto.lora.peft_targets import expert_names
from alto.lora.targets import linear_modules
from alto.spec import JobConfig
from alto.spec.job_config import ALL_LINEAR

__all__ = ["peft_all_linear", "untrained_notes"]

_NUM_STACKED = 3
_MAX_SHOWN = 4


def untrained_notes(model: PreTrainedModel, configs: Iterable[JobConfig]) -> tuple[str, ...]:
    """Return notices about stacked experts and routers that are not trained although a job's targets seem to include
    them.

    Args:
        configs: Configurations of all jobs.
    """
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
