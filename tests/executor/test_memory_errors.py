"""What counts as memory that ran out, whoever says so."""

from __future__ import annotations

import pytest
import torch

from alto.backbone import is_out_of_memory
from alto.executor.micro_batches import NoMemoryError, watching


def test_what_pytorch_says_on_this_machine_is_recognised() -> None:
    with pytest.raises(NoMemoryError) as caught, watching("forward"):
        torch.empty(2**60, dtype=torch.uint8)
    assert caught.value.phase == "forward"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        NoMemoryError("backward"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("could not create a memory object"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_other_libraries_are_understood(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: an illegal memory access was encountered"), ValueError("out of memory")]
)
def test_other_errors_are_let_through(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)), watching("forward"):
        raise error
