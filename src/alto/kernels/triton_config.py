"""Compile-time configuration of each kernel: tiles, warps and pipeline stages, from shapes and dtypes that never change
within a task.

A fixed table replaces autotuning. The choice depends on two dtypes and on the largest number of narrow columns that a
slot may have, not on the number of tokens nor on ``K`` and ``N``, which only set the number of tiles. So every step
reuses what the first one compiled, the same task gives the same bits on every run, and every kernel variant is known in
advance: ``tools/compile_kernels.py`` compiles them without a GPU, and ``docs/kernels-compiled.md`` records their
resources.

One table serves all GPUs from sm_80 on: every configuration fits in 99 KiB of shared memory, the per-program limit of
the smallest of these GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from alto.kernels.forward_table import BLOCK_TOKENS
from alto.kernels.operands import GradientTiles

SPLIT = 2048
"""Wide columns per part of ``shrink_kernel`` and ``dy_kernel``. The number is the same for all shapes, so the order of
a sum depends only on the layer."""

ADAMW_BLOCK = 1024
"""Number of columns that one program of the optimizer updates."""

_NORM_BLOCK, _NORM_TURNS = 1024, 16
NORM_SPAN = _NORM_BLOCK * _NORM_TURNS
"""Number of columns whose squares one program sums."""
_SUMS_BLOCK = 4096
"""Number of sums of squares that are loaded at a time."""

MAX_NORM_WIDTH = 16384
"""Widest row that the RMS norm kernels can keep in registers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelConfig:
    """The compile-time configuration of a kernel."""

    constants: dict[str, Any]
    num_warps: int
    num_stages: int

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of a launch."""
        return {**self.constants, **self.options}

    @property
    def options(self) -> dict[str, Any]:
        """Compiler options other than the constants.

        Fused multiply-add is set explicitly, because Triton's default changes between versions, and with it the bits.
        """
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


@cache
def shrink_config(num_narrow: int, wide: torch.dtype, bank: torch.dtype) -> KernelConfig:
    """Return the configuration of ``shrink_kernel``, for tokens of dtype ``wide`` and adapters of dtype ``bank``.

    Most of the run time is spent on reading the wide operand once, so many of its loads must be in flight together.
    """
    tile = _tile(num_narrow, wide, bank)
    block_w, num_stages = (64, 3) if _multiplies_16_bits(wide, bank) else (32, 4)
    # Three-pass products keep two parts of every factor in registers, which needs more than four warps; the sums of the
    # largest tile need more registers than eight warps have.
    num_warps = 16 if tile == 256 else 8 if wide.itemsize > 2 else 4
    return _product(tile, BLOCK_TOKENS, block_w, wide, bank, num_warps=num_warps, num_stages=num_stages, SPLIT=SPLIT)


@cache
def expand_config(wide: torch.dtype, bank: torch.dtype) -> KernelConfig:
    """Return the configuration of ``expand_kernel`` and ``dx_kernel``.

    For ranks up to the tile, the loop has a single iteration, so there is little to pipeline.
    """
    tile = 64 if wide.itemsize == 2 else 32
    # A wider tile reads the narrow side less often, but 32-bit factors need too many registers for it.
    block_w = 128 if _multiplies_16_bits(wide, bank) else 64
    return _product(tile, BLOCK_TOKENS, block_w, wide, bank, num_warps=8, num_stages=2)


@cache
def dy_config(num_narrow: int, wide: torch.dtype, bank: torch.dtype) -> KernelConfig:
    """Return the configuration of ``dy_kernel``.

    Both kinds of programs read ``dy`` from the L2 cache, and the bandwidth of this cache limits them. A program that
    processes more tokens or columns in one block reads the other operand less often.

    Args:
        num_narrow: Largest rank of a slot.
    """
    tile = _tile(num_narrow, wide, bank)
    is_16_bits = _multiplies_16_bits(wide, bank)
    # Wider tiles leave too few registers for more than 64 rows.
    block_t = 128 if is_16_bits and tile < 128 else BLOCK_TOKENS
    block_w, gradient_t, num_stages = (64, 64, 3) if is_16_bits else (32, 32, 4)
    if wide.itemsize == 4:
        num_stages = 2  # with more stages, Triton 3.6 runs out of registers on Blackwell
    return _product(
        *(tile, block_t, block_w, wide, bank),
        num_warps=8,
        num_stages=num_stages,
        SPLIT=SPLIT,
        GRADIENT_T=gradient_t,
        GRADIENT_W=_gradient_columns(tile, wide, bank),
    )


@cache
def backward_weight_config(num_narrow: int, wide: torch.dtype, bank: torch.dtype) -> KernelConfig:
    """Return the configuration of ``da_kernel``."""
    tile = _tile(num_narrow, wide, bank)
    block_t, block_w = 64 if _multiplies_16_bits(wide, bank) else 32, _gradient_columns(tile, wide, bank)
    return _product(tile, block_t, block_w, wide, bank, num_warps=8, num_stages=2)


def gradient_tiles(base: torch.dtype, bank: torch.dtype) -> GradientTiles | None:
    """See :func:`alto.kernels.reference.gradient_tiles`.

    For a bank with small ranks, the kernels use smaller tiles; an adapter then still has one tile of ranks, as with the
    largest tile.
    """
    largest = _largest_tile(base, bank)
    return GradientTiles(
        wide=_gradient_columns(64, base, bank),
        narrow=largest,
        many=128,
        wide_of_many=_gradient_columns(largest, base, bank),
    )


def _gradient_columns(tile: int, wide: torch.dtype, bank: torch.dtype) -> int:
    """Return the wide columns of a program that computes a tile of a gradient: as many as registers allow."""
    return 128 if _multiplies_16_bits(wide, bank) and tile < 256 else 64


def narrow_dtype(wide: torch.dtype, bank: torch.dtype) -> torch.dtype:
    """Return the dtype of ``s`` and ``ds``. It is the dtype that the next product needs.

    So each is rounded only once, and with 16-bit factors only half the bytes are read.
    """
    return wide if _multiplies_16_bits(wide, bank) else bank


def working_dtype(base: torch.dtype, bank: torch.dtype) -> torch.dtype | None:
    """See :func:`alto.kernels.reference.working_dtype`. Factors are rounded to this dtype, so that half the bytes are
    read."""
    return base if _multiplies_16_bits(base, bank) and bank.itemsize > base.itemsize else None


@cache
def adamw_config(bank: torch.dtype) -> KernelConfig:
    """Return the configuration of ``adamw_kernel``."""
    return KernelConfig(constants={"BLOCK": ADAMW_BLOCK, "ACCUMULATOR": _exact(bank)}, num_warps=4, num_stages=1)


@cache
def square_sums_config(bank: torch.dtype) -> KernelConfig:
    """Return the configuration of ``square_sums_kernel``."""
    constants = {"BLOCK": _NORM_BLOCK, "TURNS": _NORM_TURNS, "ACCUMULATOR": _exact(bank)}
    return KernelConfig(constants=constants, num_warps=4, num_stages=1)


@cache
def summed_norms_config(bank: torch.dtype) -> KernelConfig:
    """Return the configuration of ``summed_norms_kernel``: one program handles all sums of a slot, so it loads many at
    a time."""
    return KernelConfig(constants={"BLOCK": _SUMS_BLOCK, "ACCUMULATOR": _exact(bank)}, num_warps=8, num_stages=1)


@cache
def total_norms_config(bank: torch.dtype) -> KernelConfig:
    """Return the configuration of ``total_norms_kernel``."""
    constants = {"BLOCK": _NORM_BLOCK, "SPAN": NORM_SPAN, "ACCUMULATOR": _exact(bank)}
    return KernelConfig(constants=constants, num_warps=4, num_stages=1)


@cache
def rms_norm_config(width: int, base: torch.dtype) -> KernelConfig:
    """Return the configuration of ``rms_norm_kernel`` and ``rms_norm_backward_kernel``, for rows of ``width`` elements.

    Each thread handles sixteen elements, as long as the warps suffice; one program handles several narrow rows, such as
    those of heads.
    """
    block = max(16, triton.next_power_of_2(width))
    rows = max(1, 2048 // block)
    constants = {"ROWS": rows, "BLOCK": block, "ACCUMULATOR": _exact(base)}
    return KernelConfig(constants=constants, num_warps=min(16, rows * block // 512), num_stages=1)


@cache
def swiglu_config(width: int, base: torch.dtype) -> KernelConfig:
    """Return the configuration of ``swiglu_kernel`` and ``swiglu_backward_kernel``, for ``width`` elements per token:
    eight per thread."""
    return _of_rows(1024, width, base, num_warps=4)


@cache
def rotary_config(width: int, most_heads: int, base: torch.dtype) -> KernelConfig:
    """Return the configuration of ``rotary_kernel``: eight pairs per thread.

    Args:
        most_heads: Number of query heads or of key heads, whichever is larger.
    """
    block = max(16, triton.next_power_of_2(width // 2))
    heads = min(triton.next_power_of_2(most_heads), max(1, 1024 // block))
    rows = max(1, 1024 // (heads * block))
    constants = {"ROWS": rows, "HEADS": heads, "BLOCK": block, "ACCUMULATOR": _exact(base)}
    return KernelConfig(constants=constants, num_warps=4, num_stages=1)


@cache
def cross_entropy_config(width: int, base: torch.dtype) -> KernelConfig:
    """Return the configuration of ``cross_entropy_kernel``, for a vocabulary of ``width``.

    A program handles one row, or several short ones, and a multiprocessor runs many programs.
    """
    return _of_rows(4096, width, base, num_warps=8)


def _of_rows(numbers: int, width: int, base: torch.dtype, *, num_warps: int) -> KernelConfig:
    """Return a configuration whose programs handle ``numbers`` elements at a time: from one row, or from several
    shorter ones."""
    block = max(16, min(numbers, triton.next_power_of_2(width)))
    constants = {"ROWS": numbers // block, "BLOCK": block, "ACCUMULATOR": _exact(base)}
    return KernelConfig(constants=constants, num_warps=num_warps, num_stages=1)


def _tile(num_narrow: int, wide: torch.dtype, bank: torch.dtype) -> int:
    """Return the narrow columns per program.

    There are few sizes, because each is compiled separately; within a tile, a slot computes only its own columns.
    """
    return max(64, min(_largest_tile(wide, bank), triton.next_power_of_2(num_narrow)))


def _largest_tile(wide: torch.dtype, bank: torch.dtype) -> int:
    if _multiplies_16_bits(wide, bank):
        return 256
    # With 16-bit tokens, TF32 factors of wider tiles need more registers than are left.
    return 64 if torch.float64 in (wide, bank) or wide.itemsize == 2 else 128


def _product(
    tile: int,
    block_t: int,
    block_w: int,
    wide: torch.dtype,
    bank: torch.dtype,
    *,
    num_warps: int,
    num_stages: int,
    **others: int,
) -> KernelConfig:
    operand, accumulator, precision = _arithmetic(wide, bank)
    constants = {
        "TILE": tile,
        "BLOCK_T": block_t,
        "BLOCK_W": block_w,
        "OPERAND": operand,
        "ACCUMULATOR": accumulator,
        "PRECISION": precision,
        **others,
    }
    return KernelConfig(constants=constants, num_warps=num_warps, num_stages=num_stages)


def _multiplies_16_bits(wide: torch.dtype, bank: torch.dtype) -> bool:
    """Return whether the factors of products are rounded to 16 bits.

    With a bfloat16 base, a float32 adapter is rounded to bfloat16 when it is multiplied, as in ``torch.autocast``.
    """
    return wide == torch.bfloat16 or wide == bank == torch.float16


def _arithmetic(wide: torch.dtype, bank: torch.dtype) -> tuple[tl.dtype, tl.dtype, str]:
    """Return the dtype of the factors of a product, the dtype of its sum, and the precision for multiplying float32
    factors.

    The range of float16 may be too small for a float32 adapter. With a float16 base, such an adapter is therefore
    multiplied in TF32, which has ten mantissa bits, like float16. With a float32 base, three TF32 passes keep the
    precision of float32.
    """
    if torch.float64 in (wide, bank):
        return tl.float64, tl.float64, "ieee"
    if _multiplies_16_bits(wide, bank):
        # The interpreter would multiply the bit patterns of bfloat16 values.
        bfloat16 = tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16
        return bfloat16 if wide == torch.bfloat16 else tl.float16, tl.float32, "ieee"
    return tl.float32, tl.float32, "tf32" if wide.itemsize == 2 else "tf32x3"


def _exact(bank: torch.dtype) -> tl.dtype:
    return tl.float64 if bank == torch.float64 else tl.float32


# Launches of kernels that Triton has already compiled, without the overhead of asking Triton again what to compile.
#
# For every launch Triton binds arguments to names, checks each for specialisation, builds a string from the result and
# looks it up. A step has hundreds of launches with the same shapes, so this module does all of it once per shape.

_ALIGNMENT = 16
"""Alignment of tensors in bytes. Triton compiles a separate kernel for addresses that are not a multiple of it."""

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""Compiled kernels, and the constants that follow their arguments, by the key of :func:`_key`."""

_collected: list[KernelLaunch] | None = None
"""List that collects launches instead of running them; None if launches run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLaunch:
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


def collected_launches(run: Callable[[], None]) -> list[KernelLaunch]:
    """Return the launches that ``run`` would make, without running any; their outputs are not written.

    The result is empty in Triton's interpreter, which compiles nothing.
    """
    global _collected
    assert _collected is None, "collections do not nest"
    if triton.knobs.runtime.interpret:
        return []
    found: list[KernelLaunch] = []
    _collected = found
    try:
        run()
    finally:
        _collected = None
    return found


def compiled_launches(launches: Sequence[KernelLaunch]) -> Iterator[tuple[int, int]]:
    """Compile the kernels of ``launches`` that are not compiled yet, one per iteration.

    Yields:
        Number of kernels compiled so far and in total, before the first kernel and after each; nothing if all are
        compiled already.
    """
    left: dict[tuple[Any, ...], list[KernelLaunch]] = {}
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
        tensors: Its tensors, on the current device.
        sizes: Its integers. Each combination of values is cached separately, so they should not change in every step.
        counts: Its integers below 2³¹ that may change in every step, such as numbers of tokens; the kernel lists them
            in ``do_not_specialize``.
    """
    if triton.knobs.runtime.interpret:
        kernel[grid](*tensors, *sizes, *counts, **constants, **config.arguments)
        return
    if _collected is not None:
        _collected.append(
            KernelLaunch(
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
    cached = _compiled.get(key)
    if cached is None:
        compiled = kernel[grid](*tensors, *sizes, *counts, **constants, **config.arguments)
        num_arguments = len(tensors) + len(sizes) + len(counts)
        _compiled[key] = compiled, _values_behind(kernel, num_arguments, config, constants)
        return
    compiled, values = cached
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
