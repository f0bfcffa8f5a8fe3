"""Putting a bank's adapters into a base model, and taking them out again."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from alto.kernels import choose_backend
from alto.lora.bank import AdapterBank
from alto.lora.linear import MultiLoraLinear, PassContext
from alto.lora.targets import linear_modules

__all__ = ["eject", "inject"]


def inject(model: PreTrainedModel, bank: AdapterBank) -> PassContext:
    """Wrap every module of the bank's layout in place, instead of what another bank has wrapped.

    Returns:
        The context that tells the wrapped modules whose tokens a pass holds.
    """
    eject(model)
    context, ops = PassContext(), choose_backend()
    numbers = {module.name: number for number, module in enumerate(linear_modules(model))}
    for index, target in enumerate(bank.layout.modules):
        base = model.get_submodule(target.name)
        assert isinstance(base, nn.Linear)
        operands = bank.operands(index, numbers[target.name])
        model.set_submodule(target.name, MultiLoraLinear(base, bank, operands, context, ops))
    return context


def eject(model: PreTrainedModel) -> None:
    """Put every wrapped module's base back; a model without any stays as it is."""
    wrapped = [(name, module) for name, module in model.named_modules() if isinstance(module, MultiLoraLinear)]
    for name, module in wrapped:
        model.set_submodule(name, module.base)
