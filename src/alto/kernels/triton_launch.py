"""Launches of kernels that Triton has compiled, without asking Triton anew what to compile.

For every launch Triton binds arguments to names, looks at each for what it specialises on, writes that into a text and
looks the text up. A step has hundreds of launches with the same shapes, so here all of it is done once per shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

from alto.kernels.triton_config import KernelConfig

__all__ = ["Launch", "ceil_div", "collected_launches", "compiled_launches", "launch"]

_ALIGNMENT = 16
"""Bytes; Triton compiles a kernel of its own for tensors that do not begin at a multiple of it."""

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""By what a compiled kernel depends on: the kernel, and the constants behind its arguments."""

_collected: list[Launch] | None = None
"""Where launches are put that are only collected; None where they are made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A launch and all that its kernel's compilation depends on.

    Attributes:
        kernel, grid, tensors, sizes, config, counts, constants: As of :func:`launch`.
    """

    kernel: Any
    grid: tuple[int, int, int]
    tensors: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    config: KernelConfig
    counts: tuple[int, ...]
    constants: dict[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        """What is compiled, for these sizes."""
        return _key(self.kernel, self.tensors, self.sizes, self.config, self.constants)

    @property
    def binary(self) -> tuple[Any, ...]:
        """What is compiled: of numbers only what Triton compiles in."""
        names = self.kernel.arg_names[len(self.tensors) :]
        sizes = (
            None if name in self.kernel.do_not_specialize else (size == 1, size % _ALIGNMENT == 0)
            for name, size in zip(names, self.sizes, strict=False)
        )
        return (*self.key[: len(self.key) - len(self.sizes) - len(self.constants)], *sizes, *self.constants.values())


def ceil_div(dividend: int, divisor: int) -> int:
    """The quotient, rounded up. ``triton.cdiv`` gives the same and takes many times as long outside of kernels."""
    return -(-dividend // divisor)


def collected_launches(run: Callable[[], None]) -> list[Launch]:
    """The launches that ``run`` would make; none is made, and what they would write is left as it is. Empty in Triton's
    interpreter, which compiles nothing."""
    global _collected
    assert _collected is None, "collections do not nest"
    if triton.knobs.runtime.interpret:
        return []
    found: list[Launch] = []
    _collected = found
    try:
        run()
    finally:
        _collected = None
    return found


def compiled_launches(launches: Sequence[Launch]) -> Iterator[tuple[int, int]]:
    """Compile the kernels of ``launches``, one at each turn: number of kernels that are compiled, and of all; nothing
    where all of them are compiled already."""
    left: dict[tuple[Any, ...], list[Launch]] = {}
    for one in launches:
        if one.key not in _compiled:
            left.setdefault(one.binary, []).append(one)
    if left:
        yield 0, len(left)
    for number, same in enumerate(left.values(), 1):
        for one in same:
            arguments = (*one.tensors, *one.sizes, *one.counts)
            compiled = one.kernel.warmup(*arguments, grid=one.grid, **one.constants, **one.config.arguments)
            _compiled[one.key] = compiled, _values_behind(one.kernel, len(arguments), one.config, one.constants)
        yield number, len(left)


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    config: KernelConfig,
    counts: Sequence[int] = (),
    **constants: Any,
) -> None:
    """``kernel[grid](*tensors, *sizes, *counts, **constants, **config.arguments)``, in a fraction of the time.

    Args:
        kernel: A ``triton.jit`` function whose parameters are tensors, whole numbers and constants, in this order.
        grid: Programs.
        tensors: Its tensors, on the current device.
        sizes: Its whole numbers. Each set of values is kept apart: there should not be a new one in every step.
        config: How it is compiled.
        counts: Its whole numbers below 2³¹ that may change in every step, as numbers of tokens do; the kernel names
            them in ``do_not_specialize``.
        constants: Constants besides those of ``config``.
    """
    if triton.knobs.runtime.interpret:
        kernel[grid](*tensors, *sizes, *counts, **constants, **config.arguments)
        return
    if _collected is not None:
        _collected.append(
            Launch(
                kernel=kernel,
                grid=grid,
                tensors=(*tensors,),
                sizes=(*sizes,),
                config=config,
                counts=(*counts,),
                constants=constants,
            )
        )
        return
    key = _key(kernel, tensors, sizes, config, constants)
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[grid](*tensors, *sizes, *counts, **constants, **config.arguments)
        num_arguments = len(tensors) + len(sizes) + len(counts)
        _compiled[key] = compiled, _values_behind(kernel, num_arguments, config, constants)
        return
    compiled, values = found
    compiled[grid](*tensors, *sizes, *counts, *values)


def _key(
    kernel: Any, tensors: Sequence[Tensor], sizes: Sequence[int], config: KernelConfig, constants: dict[str, Any]
) -> tuple[Any, ...]:
    """All that a binary depends on: types, whether a tensor is aligned, and of the numbers whether they are 1, divide
    by 16 or need 64 bits."""
    device = triton.runtime.driver.active.get_current_device()
    kinds = tuple([(tensor.dtype, tensor.data_ptr() % _ALIGNMENT == 0) for tensor in tensors])
    return (kernel, device, config, kinds, *sizes, *constants.values())


def _values_behind(kernel: Any, num_arguments: int, config: KernelConfig, constants: dict[str, Any]) -> tuple[Any, ...]:
    """The constants behind a kernel's tensors and numbers, in the order of its parameters."""
    known = constants | config.constants
    return tuple(known[name] for name in kernel.arg_names[num_arguments:])
