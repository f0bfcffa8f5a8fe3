"""The backends of the ops, as a parameter for tests that every backend has to pass.

Triton runs on the GPU if there is one (``pytest -m gpu`` selects those tests), and otherwise in its interpreter; the
tests draw their tensors on the CPU in both cases.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from alto.errors import UnsupportedError
from alto.kernels import LoraOperands, choose_backend

__all__ = ["BACKENDS", "TRITON", "lowbias32"]


def lowbias32(x: int) -> int:
    """Compute the published hash on plain integers."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


class OnGpu:
    """Ops that take CPU tensors and run on the GPU, on copies with the same strides and the same shared storage.

    The bank of ``LoraOperands`` is copied to the GPU and back with them. The views of it in the operands are not
    copied, because no kernel reads them.
    """

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = getattr(self._ops, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            storages: dict[int, tuple[Any, Any]] = {}

            def send(value: Any) -> Any:
                if isinstance(value, LoraOperands):
                    operands = copy.copy(value)
                    operands.params_ZP, operands.grads_ZP = send(value.params_ZP), send(value.grads_ZP)
                    operands.sums_ZC = None if value.sums_ZC is None else send(value.sums_ZC)
                    operands._table = operands._ratios = None
                    return operands
                if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
                    return [send(item) for item in value]
                if not isinstance(value, Tensor):
                    return value
                home = value.untyped_storage()
                _, away = storages.setdefault(home.data_ptr(), (home, home.cuda()))
                moved = torch.empty(0, dtype=value.dtype, device="cuda")
                moved.set_(away, value.storage_offset(), value.shape, value.stride())
                return moved

            result = op(*map(send, args), **{key: send(value) for key, value in kwargs.items()})
            for home, away in storages.values():
                home.copy_(away)
            return _on_cpu(result)

        return run


def _on_cpu(result: Any) -> Any:
    if type(result) in (list, tuple):
        return type(result)(map(_on_cpu, result))
    return result.cpu() if isinstance(result, Tensor) else result


def _triton() -> Any:
    if find_spec("triton") is None:
        return pytest.param(None, id="triton", marks=pytest.mark.skip(reason="triton is not installed"))
    try:
        ops = choose_backend("triton")
    except UnsupportedError as error:  # an interpreter that cannot work here
        return pytest.param(None, id="triton", marks=pytest.mark.skip(reason=str(error)))
    if torch.cuda.is_available():
        return pytest.param(OnGpu(ops), id="triton", marks=pytest.mark.gpu)
    return pytest.param(ops, id="triton")


TRITON = pytest.mark.parametrize("ops", [_triton()])
BACKENDS = pytest.mark.parametrize(
    "ops",
    [
        pytest.param(choose_backend("reference"), id="reference"),
        pytest.param(choose_backend("torch"), id="torch"),
        _triton(),
    ],
)
