"""A frozen linear layer that serves every slot of a bank at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from torch import Tensor, nn

from alto.kernels import LoraOperands, TokenSchedule, grouped_lora_linear
from alto.lora.bank import AdapterBank

__all__ = ["MultiLoraLinear", "PassContext"]


class PassContext:
    """Tells every injected module which tokens of the current pass belong to which slot."""

    def __init__(self) -> None:
        self.schedule: TokenSchedule | None = None

    @contextmanager
    def use(self, schedule: TokenSchedule) -> Iterator[None]:
        """Run the enclosed forward (and backward) pass under ``schedule``."""
        assert self.schedule is None, "passes do not nest"
        self.schedule = schedule
        try:
            yield
        finally:
            self.schedule = None


class MultiLoraLinear(nn.Module):
    """A frozen linear layer with one adapter per slot. Outside a pass it is the base layer alone."""

    def __init__(
        self, base: nn.Linear, bank: AdapterBank, operands: LoraOperands, context: PassContext, ops: ModuleType
    ) -> None:
        super().__init__()
        self.base = base
        self._bank = bank
        self._operands = operands
        self._context = context
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        schedule = self._context.schedule
        if schedule is None:
            result: Tensor = self.base(x)
            return result
        y_TN = grouped_lora_linear(
            x.reshape(-1, x.shape[-1]),
            self._bank.anchor,
            self.base.weight,
            self.base.bias,
            self._operands,
            schedule,
            self._ops,
        )
        return y_TN.view(*x.shape[:-1], y_TN.shape[-1])
