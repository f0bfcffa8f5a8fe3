"""Launches of kernels that Triton has compiled, without asking Triton anew what to compile.

For every launch Triton binds arguments to names, looks at each for what it specialises on, writes that into a text and
looks the text up. A step has hundreds of launches with the same shapes, so here all of it is done once per shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
from torch import Tensor

from alto.kernels.triton_config import KernelConfig

__all__ = ["ceil_div", "launch"]

_ALIGNMENT = 16
"""Bytes; Triton compiles a kernel of its own for tensors that do not begin at a multiple of it."""

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""By what a compiled kernel depends on: the kernel, and the constants behind its arguments."""


def ceil_div(dividend: int, divisor: int) -> int:
    """The quotient, rounded up. ``triton.cdiv`` gives the same and takes many times as long outside of kernels."""
    return -(-dividend // divisor)


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    config: KernelConfig,
    **constants: Any,
) -> None:
    """``kernel[grid](*tensors, *sizes, **constants, **config.arguments)``, in a fraction of the time.

    Args:
        kernel: A ``triton.jit`` function whose parameters are tensors, whole numbers and constants, in this order.
        grid: Programs.
        tensors: Its tensors, on the current device.
        sizes: Its whole numbers. Each set of values is kept apart: there should not be a new one in every step.
        config: How it is compiled.
        constants: Constants besides those of ``config``.
    """
    if triton.knobs.runtime.interpret:
        kernel[grid](*tensors, *sizes, **constants, **config.arguments)
        return
    device = triton.runtime.driver.active.get_current_device()
    # All that a binary depends on: types, whether a tensor is aligned, and of the numbers whether they are 1, divide
    # by 16 or need 64 bits.
    kinds = tuple([(tensor.dtype, tensor.data_ptr() % _ALIGNMENT == 0) for tensor in tensors])
    key = (kernel, device, config, kinds, *sizes, *constants.values())
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[grid](*tensors, *sizes, **constants, **config.arguments)
        known = constants | config.constants
        _compiled[key] = compiled, tuple(known[name] for name in kernel.arg_names[len(tensors) + len(sizes) :])
        return
    compiled, values = found
    compiled[grid](*tensors, *sizes, *values)
