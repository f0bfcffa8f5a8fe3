"""Builds of the kernels of the base's layers for ``tools/compile_kernels.py``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from triton.compiler import ASTSource

from alto.kernels.layer_reference import NormKind
from alto.kernels.triton_config import (
    KernelConfig,
    cross_entropy_config,
    rms_norm_config,
    rotary_config,
    swiglu_config,
)
from alto.kernels.triton_kernels.layers import (
    cross_entropy_kernel,
    rms_norm_backward_kernel,
    rms_norm_kernel,
    rotary_kernel,
    swiglu_backward_kernel,
    swiglu_kernel,
)

__all__ = ["LayerBuild", "layer_builds"]

_NORM_WIDTHS = (128, 4096, 16384)
_HEAD_WIDTHS = (64, 128, 256)
_NUM_HEADS = 32
_MLP_WIDTH, _VOCABULARY = 14336, 128256
_POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
_KERNELS: dict[str, Any] = {
    "rms norm": rms_norm_kernel,
    "rms norm, backward": rms_norm_backward_kernel,
    "swiglu": swiglu_kernel,
    "swiglu, backward": swiglu_backward_kernel,
    "rotary": rotary_kernel,
    "rotary, backward": rotary_kernel,
    "losses": cross_entropy_kernel,
    "losses, gradient": cross_entropy_kernel,
}
_COUNTED = ("num_q", "num_k")
"""Integers that need not be divisible by 16."""


@dataclass(frozen=True, kw_only=True)
class LayerBuild:
    """One kernel of a layer, on tensors whose rows are aligned for vector loads.

    Attributes:
        op: Key of ``_KERNELS``.
        config: Compile-time configuration.
        constants: Constants besides those of ``config``.
        base: Dtype of the activations.
        arch: Architecture: 90 for sm_90.
    """

    op: str
    config: KernelConfig
    constants: dict[str, Any]
    base: torch.dtype
    arch: int

    @property
    def kernel(self) -> Any:
        return _KERNELS[self.op]

    @property
    def name(self) -> str:
        """First cells of its line in the page."""
        known = self.config.constants
        tiles = "×".join(str(known[name]) for name in ("ROWS", "HEADS", "BLOCK") if name in known)
        base = str(self.base).removeprefix("torch.")
        return f"| {self.op} | {base} | {tiles} | {self.config.num_warps} | {self.config.num_stages} | {self.arch} |"

    def source(self) -> ASTSource:
        known = self.config.constants | self.constants
        signature, constants, attributes = {}, {}, {}
        for index, name in enumerate(self.kernel.arg_names):
            if name in known:
                signature[name], constants[(index,)] = "constexpr", known[name]
                continue
            signature[name] = self._type_of(name)
            if name not in (*self.kernel.do_not_specialize, *_COUNTED):
                attributes[(index,)] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature, constants, attributes)

    def _type_of(self, name: str) -> str:
        if name.startswith(("stride_", "num_")) or name in ("width", "half"):
            return "i32"
        if name == "targets_C":
            return "*i64"
        return "*fp32" if name == "losses_C" else _POINTERS[self.base]


def layer_builds(arches: Iterable[int], bases: Iterable[torch.dtype]) -> Iterator[LayerBuild]:
    """Yield every kernel, for widths of usual models."""
    kinds = list(dict.fromkeys(bases))
    for arch in arches:
        for base in kinds:
            for op, config, constants in _variants(base):
                yield LayerBuild(op=op, config=config, constants=constants, base=base, arch=arch)


def _variants(base: torch.dtype) -> Iterator[tuple[str, KernelConfig, dict[str, Any]]]:
    norm = {"KIND": int(NormKind.ROUNDED), "EPSILON": 1e-6}
    for width in _NORM_WIDTHS:
        yield "rms norm", rms_norm_config(width, base), norm
        yield "rms norm, backward", rms_norm_config(width, base), norm
    yield "swiglu", swiglu_config(_MLP_WIDTH, base), {}
    yield "swiglu, backward", swiglu_config(_MLP_WIDTH, base), {}
    for width in _HEAD_WIDTHS:
        config = rotary_config(width, _NUM_HEADS, base)
        yield "rotary", config, {"IS_BACKWARD": False, "IS_ROUNDED": True}
        yield "rotary, backward", config, {"IS_BACKWARD": True, "IS_ROUNDED": True}
    config = cross_entropy_config(_VOCABULARY, base)
    yield "losses", config, {"HAS_GRADIENT": False}
    yield "losses, gradient", config, {"HAS_GRADIENT": True}
