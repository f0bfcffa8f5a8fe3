"""Injection of a bank's adapters into a base model, and their removal."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from transformers import PreTrainedModel

from alto.kernels import LoraOperands, SlotTensors
from alto.lora.bank import AdapterBank
from alto.lora.biases import MultiBiasModule, is_bias, module_of_bias
from alto.lora.dora import Dora
from alto.lora.experts import MultiLoraExperts, MultiLoraRouter
from alto.lora.heads import whole_weights
from alto.lora.linear import ForwardContext, FrozenWeight, InjectedModule, MultiLoraLinear, PositionMap, SharedInput
from alto.lora.magnitudes import magnitude_of
from alto.lora.targets import (
    adaptable,
    base_modules,
    expert_bases,
    head_base,
    linear_bases,
    router_bases,
)
from alto.lora.vocabulary import MultiLoraEmbedding, MultiLoraHead


def inject(
    model: PreTrainedModel, bank: AdapterBank, places: Callable[[], PositionMap | None] | None = None
) -> ForwardContext:
    """Wrap every module of the bank's layout in place; modules wrapped for another bank are unwrapped first.

    Args:
        places: See :class:`ForwardContext`.

    Returns:
        The context that tells the wrapped modules which slot each token of a micro-batch belongs to.
    """
    eject(model)
    context = ForwardContext(places)
    bases, routers, of_experts = linear_bases(model), router_bases(model), expert_bases(model)
    # A group takes the number of its first module in the model, even if no job targets that module.
    numbers = {target.name: number for number, target in enumerate(adaptable(model))}
    numbers |= {name: numbers[names[0]] for names in bank.layout.shared_inputs for name in names}
    operands_of_experts: dict[str, dict[str, LoraOperands]] = {}
    of_ends: dict[str, LoraOperands] = {}
    for index, group in enumerate(bank.layout.groups):
        operands = bank.operands(index, numbers[group[0].name])
        if group[0].num_experts:
            owner, _, key = group[0].name.rpartition(".")
            operands_of_experts.setdefault(owner, {})[key] = operands
            continue
        if group[0].is_router:
            router = MultiLoraRouter(routers[group[0].name], group[0].name, bank, context, operands)
            model.set_submodule(group[0].name, router)
            continue
        if not group[0].is_in_body:
            of_ends[group[0].name] = operands
            continue
        members = [bases[module.name] for module in group]
        biases = [bank.tensors(f"{module.name}.bias") for module in group]
        magnitudes = [_magnitude(bank, module.name) for module in group]
        weights = tuple(map(FrozenWeight, members))
        dora = Dora(weights, bank, operands, magnitudes)
        shared = SharedInput(weights, bank, operands, context, biases, dora)
        for member, (module, base) in enumerate(zip(group, members, strict=True)):
            model.set_submodule(module.name, MultiLoraLinear(base, module.name, shared, member))
    for name, operands_by_key in operands_of_experts.items():
        model.set_submodule(name, MultiLoraExperts(of_experts[name], name, bank, context, operands_by_key))
    _inject_ends(model, bank, context, of_ends)
    _inject_biases(model, bank, context)
    return context


def _magnitude(bank: AdapterBank, module: str) -> tuple[SlotTensors, Tensor] | None:
    """Return the magnitude vectors of the slots for a module, and their initial value: the row norms of the frozen
    weight."""
    name = magnitude_of(module)
    vectors = bank.tensors(name)
    return None if vectors is None else (vectors, bank.initial[name].to(bank.params_ZP.device))


def _inject_ends(
    model: PreTrainedModel, bank: AdapterBank, context: ForwardContext, operands: Mapping[str, LoraOperands]
) -> None:
    """Wrap the output head and the embeddings if they have adapters or are trained in full."""
    whole = set(whole_weights({extra.name: extra for extra in bank.layout.extras}))
    modules, head = base_modules(model), head_base(model)
    for name in {*operands, *whole}:
        base = modules[name]
        if base is head:
            assert isinstance(base, nn.Linear)
            wrapped: nn.Module = MultiLoraHead(base, name, bank, context, operands.get(name))
        else:
            assert isinstance(base, nn.Embedding)
            wrapped = MultiLoraEmbedding(base, name, bank, context, operands.get(name))
        model.set_submodule(name, wrapped)


def _inject_biases(model: PreTrainedModel, bank: AdapterBank, context: ForwardContext) -> None:
    """Wrap the modules without adapters whose biases are trained."""
    adapted, modules = {module.name for module in bank.layout.modules}, base_modules(model)
    for name in (module_of_bias(extra.name) for extra in bank.layout.extras if is_bias(extra.name)):
        if name not in adapted:
            biases = bank.tensors(f"{name}.bias")
            assert biases is not None
            model.set_submodule(name, MultiBiasModule(modules[name], name, bank, context, biases))


def eject(model: PreTrainedModel) -> None:
    """Restore the base layer of every wrapped module; a model without wrapped modules is not changed."""
    wrapped = [(name, module) for name, module in model.named_modules() if isinstance(module, InjectedModule)]
    for name, module in wrapped:
        model.set_submodule(name, module.base)
