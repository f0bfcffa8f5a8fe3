"""Frozen linear layers that apply the adapters of all slots at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from weakref import WeakSet

import torch
from torch import Tensor, nn

from alto.kernels import LoraOperands, TokenSchedule, grouped_lora_linear
from alto.lora.bank import AdapterBank

__all__ = ["ForwardContext", "MultiLoraLinear", "SharedInput"]


class ForwardContext:
    """Gives every injected module the slots of the current forward pass's tokens.

    The model owns its groups, and they the bank: here they are only referred to, so that a bank is freed with the model
    that it serves (or when it is taken out of it), at once and not when Python next collects cycles.
    """

    def __init__(self) -> None:
        self.schedule: TokenSchedule | None = None
        self.groups: WeakSet[SharedInput] = WeakSet()

    @contextmanager
    def use(self, schedule: TokenSchedule) -> Iterator[None]:
        """Run the enclosed forward and backward pass under ``schedule``."""
        assert self.schedule is None, "passes do not nest"
        self.schedule = schedule
        try:
            yield
        finally:
            self.schedule = None
            for group in self.groups:
                group.forget()


class SharedInput:
    """Linear layers that read the same input: the first call computes the outputs of all.

    A member that is called with another tensor is also correct, but shares no work.
    """

    def __init__(
        self,
        bases: Sequence[nn.Linear],
        bank: AdapterBank,
        operands: LoraOperands,
        context: ForwardContext,
        ops: ModuleType,
    ) -> None:
        self._bases = tuple(bases)
        self._bank = bank
        self._operands = operands
        self._context = context
        self._ops = ops
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}
        context.groups.add(self)

    @property
    def is_in_forward(self) -> bool:
        return self._context.schedule is not None

    def output(self, member: int, x: Tensor) -> Tensor:
        """Output of layer ``member`` for ``x``; every output is returned once."""
        if self._input is not x or member not in self._outputs:
            self._input, self._outputs = x, dict(enumerate(self._compute(x)))
        output = self._outputs.pop(member)
        if not self._outputs:
            self.forget()
        return output

    def forget(self) -> None:
        """Free outputs that were not used."""
        self._input, self._outputs = None, {}

    def _compute(self, x: Tensor) -> Iterator[Tensor]:
        schedule = self._context.schedule
        assert schedule is not None
        ys = grouped_lora_linear(
            x.reshape(-1, x.shape[-1]), self._bank.anchor, self._bases, self._operands, schedule, self._ops
        )
        return (y_TN.view(*x.shape[:-1], y_TN.shape[-1]) for y_TN in ys)


class MultiLoraLinear(nn.Module):
    """A frozen linear layer with one adapter per slot. Outside of a schedule it is only the base layer."""

    def __init__(self, base: nn.Linear, shared: SharedInput, member: int) -> None:
        super().__init__()
        self.base = base
        self._shared = shared
        self._member = member

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # writes to the bank, which is outside of graphs
    def forward(self, x: Tensor) -> Tensor:
        if self._shared.is_in_forward:
            return self._shared.output(self._member, x)
        result: Tensor = self.base(x)
        return result
