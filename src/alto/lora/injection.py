"""Injects a bank's adapters into a base model, and removes them."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel

from alto.kernels import LoraOperands, choose_backend
from alto.lora.bank import AdapterBank
from alto.lora.experts import MultiLoraExperts
from alto.lora.linear import ForwardContext, MultiLoraLinear, RowPlaces, SharedInput, packed
from alto.lora.routers import MultiLoraRouter
from alto.lora.targets import adaptable, expert_bases, linear_bases, router_bases

__all__ = ["eject", "inject"]


def inject(
    model: PreTrainedModel, bank: AdapterBank, places: Callable[[], RowPlaces | None] = packed
) -> ForwardContext:
    """Wrap every module of the bank's layout in place; modules wrapped for another bank are unwrapped first.

    Args:
        model: The base model.
        bank: Adapters of all slots.
        places: See :class:`ForwardContext`.

    Returns:
        The context that gives the wrapped modules the slots of a micro-batch's tokens.
    """
    eject(model)
    context, ops = ForwardContext(places), choose_backend(device=bank.params_ZP.device)
    bases, routers, of_experts = linear_bases(model), router_bases(model), expert_bases(model)
    # A group's number is that of its first module in the model, whether or not a job targets that module.
    numbers = {target.name: number for number, target in enumerate(adaptable(model))}
    numbers |= {name: numbers[names[0]] for names in bank.layout.shared_inputs for name in names}
    operands_of_experts: dict[str, dict[str, LoraOperands]] = {}
    for index, group in enumerate(bank.layout.groups):
        operands = bank.operands(index, numbers[group[0].name])
        if group[0].num_experts:
            owner, _, key = group[0].name.rpartition(".")
            operands_of_experts.setdefault(owner, {})[key] = operands
            continue
        if group[0].is_router:
            router = MultiLoraRouter(routers[group[0].name], group[0].name, bank, operands, context, ops)
            model.set_submodule(group[0].name, router)
            continue
        members = [bases[module.name] for module in group]
        shared = SharedInput(members, bank, operands, context, ops)
        for member, (module, base) in enumerate(zip(group, members, strict=True)):
            model.set_submodule(module.name, MultiLoraLinear(base, module.name, shared, member))
    for name, operands_by_key in operands_of_experts.items():
        model.set_submodule(name, MultiLoraExperts(of_experts[name], bank, operands_by_key, context, ops))
    return context


def eject(model: PreTrainedModel) -> None:
    """Restore every wrapped module's base layer; a model without wrapped modules is not changed."""
    kinds = MultiLoraLinear | MultiLoraRouter | MultiLoraExperts
    wrapped = [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]
    for name, module in wrapped:
        model.set_submodule(name, module.base)
