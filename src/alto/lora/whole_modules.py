"""Modules of the base model that jobs train in full (``modules_to_save``): the output head and the embeddings.

Each job trains its own copy of the weight, an extra tensor of its adapter that starts as the frozen weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from alto.errors import TargetModuleError, UnsupportedError
from alto.lora.heads import HEAD
from alto.lora.layout import ExtraTensor
from alto.lora.targets import base_modules, embedding_base, head_base
from alto.spec import JobConfig

__all__ = ["is_whole", "module_of_whole", "whole_name", "whole_shapes", "whole_tensors", "whole_weights"]

_ENDING = ".weight"


def whole_name(module: str) -> str:
    """Return the name of a module's weight."""
    return f"{module}{_ENDING}"


def is_whole(name: str) -> bool:
    """Return whether an extra tensor of an adapter is the full weight of a module of the base model."""
    return name.endswith(_ENDING) and name != HEAD


def module_of_whole(name: str) -> str:
    """Return the name of the module that has the weight ``name``."""
    return name.removesuffix(_ENDING)


def whole_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that jobs can train in full, by full name: the output head, if it has no bias,
    and the token embeddings."""
    head, embeddings = head_base(model), embedding_base(model)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in base_modules(model).items():
        is_head = module is head and isinstance(module, nn.Linear) and module.bias is None
        if is_head or (module is embeddings and isinstance(module, nn.Embedding)):
            weight: Any = module.weight
            shapes[whole_name(name)] = tuple(weight.shape)
    return shapes


def whole_tensors(
    model: PreTrainedModel, config: JobConfig, targets: Iterable[str], *, has_labels: bool
) -> tuple[ExtraTensor, ...]:
    """Return the weights that a job trains in full, in the model's order.

    Weight decay applies to them. With LoRA+ they use the learning rate of ``A``.

    Args:
        targets: Full names of the modules with low-rank matrices.
        has_labels: Whether the job trains a classification head in place of the output head.

    Raises:
        TargetModuleError: The model has no such module, or the module also has low-rank matrices.
        UnsupportedError: Training this module in full, or with the job's other settings, is not implemented.
    """
    if not config.modules_to_save:
        return ()
    head, modules, shapes = head_base(model), base_modules(model), whole_shapes(model)
    found: set[str] = set()
    for text in config.modules_to_save:
        named = {name for name in modules if name == text or name.endswith(f".{text}")}
        if not named:
            raise TargetModuleError(
                f"modules_to_save: expected modules of the model, found none under {text!r}; it can be "
                f"{' or '.join(map(module_of_whole, shapes))}"
            )
        for name in sorted(named):
            if whole_name(name) not in shapes:
                raise UnsupportedError(
                    f"modules_to_save: expected {' or '.join(map(module_of_whole, shapes))}, found {text!r}, which is "
                    f"{name}, a {type(modules[name]).__name__}, whose training as a whole is not implemented; leave it "
                    "out, or name it in target_modules if it is linear"
                )
        found |= named
    for name in sorted(found):
        _check(name, modules[name], config, is_head=modules[name] is head, has_labels=has_labels)
        if name in targets:
            raise TargetModuleError(
                f"modules_to_save: expected modules without low-rank matrices, found {name}, which is also in "
                "target_modules; name it in only one of them"
            )
    return tuple(
        ExtraTensor(name=whole_name(name), shape=shapes[whole_name(name)]) for name in modules if name in found
    )


def _check(name: str, module: Any, config: JobConfig, *, is_head: bool, has_labels: bool) -> None:
    if is_head and has_labels:
        expected, found = "modules of a classifier", "the output head, which a classification head replaces"
        remedy = "leave it out"
    elif isinstance(module.weight, DTensor):
        expected, found, remedy = "num_gpus: 1", "a base model that is sharded over GPUs", "write num_gpus: 1"
    elif not is_head and config.optim.endswith("8bit"):
        expected, found = "an optimizer of 32 bits", f"{config.optim}, whose states transformers keeps in 32 bits there"
        remedy = "write optim: adamw_torch"
    else:
        return
    raise UnsupportedError(f"modules_to_save: expected {expected} for {name}, found {found}; {remedy}")


def whole_weights(extras: Mapping[str, Any]) -> list[str]:
    """Return the modules that are trained in full, given an adapter's extra tensors."""
    return [module_of_whole(name) for name in extras if is_whole(name)]
