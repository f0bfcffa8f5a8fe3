"""Parameter groups of one adapter's optimizer, as PEFT's LoRA+ and transformers' Trainer build them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from alto.spec import JobConfig

__all__ = ["parameter_groups", "set_rates"]


def parameter_groups(parameters: Mapping[str, nn.Parameter], undecayed: Collection[str]) -> list[dict[str, Any]]:
    """Return parameter groups that share a learning rate and weight decay; :func:`set_rates` sets both.

    Args:
        parameters: Parameters by ``<module>.A``, ``<module>.B``, or the name of an extra tensor. Vectors use the
            learning rate of ``B``.
        undecayed: Names of parameters without weight decay.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        has_rate_of_b = name.endswith(".B") or parameter.ndim == 1
        groups.setdefault((has_rate_of_b, name not in undecayed), []).append(parameter)
    return [
        {"params": group, "has_rate_of_b": has_rate_of_b, "has_decay": has_decay}
        for (has_rate_of_b, has_decay), group in groups.items()
    ]


def set_rates(groups: Iterable[dict[str, Any]], config: JobConfig, learning_rate: float) -> None:
    """Set learning rate and weight decay of every group.

    Args:
        learning_rate: Learning rate of every ``A``. ``B`` and vectors use it times ``config.loraplus_lr_ratio``.
    """
    for group in groups:
        group["lr"] = learning_rate * (config.loraplus_lr_ratio if group["has_rate_of_b"] else 1.0)
        group["weight_decay"] = config.weight_decay if group["has_decay"] else 0.0
