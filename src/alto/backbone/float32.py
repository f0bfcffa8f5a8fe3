"""Runs a half-precision model in float32, one module at a time, without a second copy of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from alto.backbone.sharding import is_sharded

__all__ = ["can_widen", "in_float32", "widened"]

_HALF = (torch.bfloat16, torch.float16)


def can_widen(model: nn.Module) -> bool:
    """Return whether ``model`` is in half precision, and neither quantised nor sharded."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    is_half = bool(dtypes.intersection(_HALF)) and all(dtype.is_floating_point for dtype in dtypes)
    return is_half and not any(is_sharded(module) for module in model.modules())


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Convert each module's own parameters to float32 while it runs, so that its outputs are float32."""
    running: dict[nn.Module, ExitStack] = {}

    def enter(module: nn.Module, _: Any) -> None:
        if module not in running:
            running[module] = ExitStack()
            running[module].enter_context(widened(module))

    def leave(module: nn.Module, *_: Any) -> None:
        running.pop(module).close()

    owners = [m for m in model.modules() if any(_is_half(value) for value in _own(m))]
    hooks = [module.register_forward_pre_hook(enter) for module in owners]
    hooks += [module.register_forward_hook(leave) for module in owners]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for stack in running.values():  # not empty if an error has ended a forward pass
            stack.close()


@contextmanager
def widened(module: nn.Module) -> Iterator[None]:
    """Convert the module's own parameters and buffers to float32 inside the context, and restore them after it."""
    kept = [(value, value.data) for value in _own(module) if _is_half(value)]
    try:
        for value, data in kept:
            value.data = data.float()
        yield
    finally:
        for value, data in kept:
            value.data = data


def _own(module: nn.Module) -> list[Tensor]:
    own = (*module._parameters.values(), *module._buffers.values())
    return [value for value in own if value is not None]


def _is_half(value: Tensor) -> bool:
    return value.dtype in _HALF
