"""Routers of a mixture that hold their weight directly, with an adapter per slot.

Such a router is a linear layer followed by more steps (a softmax, the choice of experts), all in one module. While it
runs, its weight is replaced by one whose product with the tokens includes the adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from alto.kernels import LoraOperands, added_linear, grouped_lora_linear
from alto.lora.adapted_weight import AdaptedWeight
from alto.lora.bank import AdapterBank
from alto.lora.injected import InjectedModule
from alto.lora.linear import ForwardContext

__all__ = ["MultiLoraRouter"]


class MultiLoraRouter(InjectedModule):
    """A frozen router with one adapter per slot. Outside of a schedule it acts as the base router.

    Args:
        base: The router; its parameter ``weight`` is ``[E, H]``.
        name: Full name in the model.
        ops: The kernel backend module.
    """

    def __init__(
        self,
        base: nn.Module,
        name: str,
        bank: AdapterBank,
        operands: LoraOperands,
        context: ForwardContext,
        ops: ModuleType,
    ) -> None:
        super().__init__()
        self.base = base
        self._name = name
        self._bank = bank
        self._operands = operands
        self._context = context
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the base, because expert blocks read settings of their router, such as a bias for
        choosing experts."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # writes to the bank, which is outside of graphs
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._context.schedule is None:
            return self.base(*args, **kwargs)
        with self._adapted():
            return self.base(*args, **kwargs)

    @contextmanager
    def _adapted(self) -> Iterator[None]:
        parameters = self.base._parameters
        weight = parameters["weight"]
        assert weight is not None
        parameters["weight"] = AdaptedWeight.of(weight, self._name, self._product)
        try:
            yield
        finally:
            parameters["weight"] = weight

    def _product(self, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        schedule, places = self._context.schedule, self._context.places()
        assert schedule is not None
        x_TK = x.reshape(-1, x.shape[-1])
        if places is not None:
            x_TK = places.collect(x_TK)
        base = _GivenWeight(weight_NK, bias_N)
        (y_TN,) = grouped_lora_linear(x_TK, self._bank.anchor, [base], self._operands, schedule, self._ops)
        if places is not None:
            y_TN = places.spread(y_TN)
        return y_TN.view(*x.shape[:-1], -1)


class _GivenWeight:
    """A frozen linear layer with the given weight and bias."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        self._weight_NK = weight_NK
        self._bias_N = bias_N

    def forward(self, x_TK: Tensor, y_TN: Tensor | None = None) -> Tensor:
        return added_linear(x_TK, self._weight_NK, self._bias_N, y_TN)

    def backward(self, dy_TN: Tensor, dx_TK: Tensor | None) -> Tensor:
        return dy_TN @ self._weight_NK if dx_TK is None else dx_TK.addmm_(dy_TN, self._weight_NK)
