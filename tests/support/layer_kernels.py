"""The kernels of the base's layers in tests: on the GPU if there is one, and otherwise in Triton's interpreter."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from alto.errors import UnsupportedError
from alto.kernels import layer_functions_on

__all__ = ["TOLERANCES", "functions", "on_device"]

TOLERANCES = [(torch.float64, 1e-13), (torch.float32, 3e-6), (torch.bfloat16, 2.0**-5)]
"""Dtypes, and the allowed difference of a number from that of float64, relative to the largest of its row. Triton's
interpreter truncates where its compiler rounds, which doubles the difference."""


def functions() -> ModuleType:
    """Return :mod:`alto.kernels.layer_functions`; skip the test if it cannot run."""
    try:
        found = layer_functions_on(device="cuda" if torch.cuda.is_available() else "cpu", name="triton")
    except UnsupportedError as error:
        pytest.skip(str(error))
    assert found is not None
    return found


def on_device(x: Tensor) -> Tensor:
    """Return ``x`` on the device of the kernels, with its strides, as a leaf."""
    if not torch.cuda.is_available():
        return x.detach()
    storage = x.untyped_storage().cuda()
    return torch.empty(0, dtype=x.dtype, device="cuda").set_(storage, x.storage_offset(), x.shape, x.stride())
