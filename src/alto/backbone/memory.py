"""Recognises out-of-memory errors of PyTorch and its libraries."""

from __future__ import annotations

import gc

import torch

_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",  # PyTorch on a CPU
    "DefaultCPUAllocator: not enough memory",  # the same on Windows
    "std::bad_alloc",
    "could not create a memory object",  # oneDNN
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
)
"""Messages of a ``RuntimeError`` with which libraries report it if they have no error type for it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` means that the device, or the machine, has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


def device_name(device: torch.device) -> str:
    """Return the kind of device: ``cpu``, or the model of a GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def release_memory() -> None:
    """Release unused memory: tensors in reference cycles, and PyTorch's cache."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
