"""Injection: the base model's linear modules learn to serve every slot of a bank at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from torch import Tensor, nn
from transformers import PreTrainedModel

from alto.kernels import LoraOperands, TokenSchedule, choose_backend, grouped_lora_linear
from alto.lora.bank import AdapterBank
from alto.lora.layout import linear_modules

__all__ = ["MultiLoraLinear", "PassContext", "inject"]


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


def inject(model: PreTrainedModel, bank: AdapterBank) -> PassContext:
    """Wrap every module of the bank's layout in place; returns the context that feeds them."""
    context, ops = PassContext(), choose_backend()
    numbers = {module.name: number for number, module in enumerate(linear_modules(model))}
    for index, target in enumerate(bank.layout.modules):
        parent_name, _, leaf = target.name.rpartition(".")
        parent = model.get_submodule(parent_name)
        base = getattr(parent, leaf)
        assert isinstance(base, nn.Linear)
        setattr(parent, leaf, MultiLoraLinear(base, bank, bank.operands(index, numbers[target.name]), context, ops))
    return context
