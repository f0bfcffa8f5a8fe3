"""Checks of the machine: PyTorch, its devices and memory, and whether the kernels compute what they should."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from alto.executor.profiling.meter import capacity_bytes
from alto.kernels import LoraOperands, TokenSchedule, choose_backend

_NUM_TOKENS, _IN, _OUT, _RANK = 48, 64, 32, 8
_TOLERANCE = 2e-2
"""Relative error that products in TF32 may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """A GPU that PyTorch can use, with its memory in bytes."""

    name: str
    total_bytes: int
    free_bytes: int


def gpus() -> tuple[GpuMemory, ...]:
    """Return the GPUs that PyTorch can use."""
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        found.append(GpuMemory(name=torch.cuda.get_device_name(index), total_bytes=total, free_bytes=free))
    return tuple(found)


def hidden_gpu() -> str:
    """Return why PyTorch cannot use an NVIDIA GPU whose driver is loaded; empty if it can, or if there is none."""
    if torch.cuda.is_available() or not Path("/proc/driver/nvidia/version").exists():
        return ""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""  # the user hides it
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__}, which is built without CUDA"
    return f"PyTorch {torch.__version__}, which needs a driver for CUDA {torch.version.cuda}"


def memory_bytes() -> int:
    """Return the memory of the machine or of its container, in bytes."""
    return capacity_bytes(torch.device("cpu"))


def check_kernels() -> str:
    """Compile and run the kernels of two adapters on the first device, and return the name of their backend.

    Raises:
        RuntimeError: Their results differ from those of the plain reference. (Compilers raise errors of their own.)
        AltoError: See :func:`alto.kernels.choose_backend`.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = choose_backend(device=device)
    found, expected = (_product(ops, device) for ops in (backend, choose_backend("reference")))
    error = float((found - expected).abs().max() / expected.abs().max())
    if not error <= _TOLERANCE:
        raise RuntimeError(f"the kernels' results differ by {error:.1%} from those of the reference")
    return backend.__name__.rpartition(".")[2].removesuffix("_backend")


def _product(ops: ModuleType, device: torch.device) -> torch.Tensor:
    """Return the outputs of two adapters of different ranks on a few tokens."""
    generator = torch.Generator().manual_seed(0)
    size = _RANK * (_IN + _OUT)
    params_ZP, x_TK = (torch.randn(shape, generator=generator).to(device) for shape in ((2, size), (_NUM_TOKENS, _IN)))
    operands = LoraOperands(
        number=0,
        in_features=_IN,
        out_features=[_OUT],
        params_ZP=params_ZP,
        grads_ZP=torch.zeros_like(params_ZP),
        max_rank=_RANK,
    )
    for slot, rank in enumerate((_RANK, _RANK // 2)):
        operands.assign(slot, [rank], 0, [_IN * rank])
    schedule = TokenSchedule.build([0, 1], [_NUM_TOKENS // 3, _NUM_TOKENS - _NUM_TOKENS // 3], [1.0, 2.0])
    y_TN = torch.empty(_NUM_TOKENS, _OUT, device=device)
    ops.grouped_expand(ops.grouped_shrink(x_TK, operands, schedule), operands, [y_TN], schedule)
    return y_TN
