"""Copies of a model's modules with other, small weights, to test what a module's forward pass computes. This also works
where the module's own weights are quantised or sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["bare_copy", "is_near"]


def bare_copy(
    module: nn.Module, *, weights: Mapping[str, Tensor] | None = None, children: Mapping[str, nn.Module] | None = None
) -> Any:
    """Return a module of the same class and settings, without hooks, that has only these weights and submodules."""
    copy: Any = object.__new__(type(module))
    nn.Module.__init__(copy)
    internal = set(vars(copy))
    vars(copy).update({name: value for name, value in vars(module).items() if name not in internal | {"forward"}})
    for name, weight in (weights or {}).items():
        copy.register_parameter(name, nn.Parameter(weight, requires_grad=False))
    for name, child in (children or {}).items():
        copy.add_module(name, child)
    copy.training = False
    return copy


def is_near(found: Tensor, expected: Tensor, limit: float) -> bool:
    """Return whether all numbers differ by at most ``limit``, relative to the largest of their row; False for NaN."""
    largest = expected.double().abs().amax(-1, keepdim=True)
    return bool(((found.double() - expected.double()).abs() <= limit * largest).all())
