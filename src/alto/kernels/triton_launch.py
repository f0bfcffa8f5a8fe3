"""Launches of kernels that Triton has already compiled, without the overhead of asking Triton again what to compile.

For every launch Triton binds arguments to names, checks each for specialisation, builds a string from the result and
looks it up. A step has hundreds of launches with the same shapes, so this module does all of it once per shape.
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
"""In bytes. Triton compiles a separate kernel for tensors whose address is not a multiple of it."""

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""Compiled kernels, and the constants that follow their arguments, by the key of :func:`_key`."""

_collected: list[Launch] | None = None
"""List that collects launches instead of running them; None if launches run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A launch, with everything that the compilation of its kernel depends on.

    Attributes:
        kernel, grid, tensors, sizes, config, counts, constants: See :func:`launch`.
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
        """Key of the compiled kernel, including the values of its sizes."""
        return _key(self.kernel, self.tensors, self.sizes, self.config, self.constants)

    @property
    def binary(self) -> tuple[Any, ...]:
        """Key of the compiled kernel, with only those properties of sizes that Triton compiles in."""
        names = self.kernel.arg_names[len(self.tensors) :]
        sizes = (
            None if name in self.kernel.do_not_specialize else (size == 1, size % _ALIGNMENT == 0)
            for name, size in zip(names, self.sizes, strict=False)
        )
        return (*self.key[: len(self.key) - len(self.sizes) - len(self.constants)], *sizes, *self.constants.values())


def ceil_div(dividend: int, divisor: int) -> int:
    """Return the quotient, rounded up. ``triton.cdiv`` gives the same result, but is many times slower outside of
    kernels."""
    return -(-dividend // divisor)


def collected_launches(run: Callable[[], None]) -> list[Launch]:
    """Return the launches that ``run`` would make, without running any; their outputs are not written.

    The result is empty in Triton's interpreter, which compiles nothing.
    """
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
    """Compile the kernels of ``launches`` that are not compiled yet, one per iteration.

    Yields:
        Number of kernels compiled so far and in total, before the first kernel and after each; nothing if all are
        compiled already.
    """
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
    """Run ``kernel[grid](*tensors, *sizes, *counts, **constants, **config.arguments)``, with far less overhead.

    Args:
        kernel: A ``triton.jit`` function whose parameters are tensors, integers and constants, in this order.
        grid: Number of programs in each dimension.
        tensors: Its tensors, on the current device.
        sizes: Its integers. Each combination of values is cached separately, so they should not change in every step.
        config: Compile-time configuration.
        counts: Its integers below 2³¹ that may change in every step, such as numbers of tokens; the kernel lists them
            in ``do_not_specialize``.
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
    """Return the key of a compiled kernel: kernel, device, configuration, dtype and alignment of tensors, sizes and
    constants."""
    device = triton.runtime.driver.active.get_current_device()
    kinds = tuple([(tensor.dtype, tensor.data_ptr() % _ALIGNMENT == 0) for tensor in tensors])
    return (kernel, device, config, kinds, *sizes, *constants.values())


def _values_behind(kernel: Any, num_arguments: int, config: KernelConfig, constants: dict[str, Any]) -> tuple[Any, ...]:
    """Return the constants that follow a kernel's tensors and integers, in the order of its parameters."""
    known = constants | config.constants
    return tuple(known[name] for name in kernel.arg_names[num_arguments:])
