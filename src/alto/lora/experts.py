"""Experts of a mixture, stacked in one parameter per projection, with an adapter per slot and expert.

The tokens that the router sends to an expert are sorted by expert and, within an expert, by slot. The ops of
:mod:`alto.kernels` see every pair of slot and expert as a separate slot with its own segment of tokens.

The token counts per expert are known only after the router has run, so each mixture layer waits for the device once per
forward pass; transformers' own loop over experts does, too.

Shapes: ``T`` tokens, ``C`` experts chosen per token, ``S = T · C`` selected tokens, ``E`` experts, ``Z`` slots, ``H``
hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from alto.kernels import LoraOperands, TokenSchedule, added_linear, grouped_lora_linear
from alto.lora.bank import AdapterBank
from alto.lora.layout import TargetModule
from alto.lora.linear import AdaptedWeight, ForwardContext, FrozenWeight, SettingsModule

_ATTRIBUTES = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "_apply_gate", "num_experts")
"""Attributes that transformers' ``use_experts_implementation`` adds to every class of stacked experts (transformers
5)."""


def is_adaptable(module: nn.Module) -> bool:
    """Return whether ``module`` holds stacked experts in the form that transformers' grouped forward passes accept."""
    return all(hasattr(module, name) for name in _ATTRIBUTES)


def expert_parameters(module: nn.Module, name: str) -> tuple[TargetModule, ...]:
    """Return the parameters of the experts in ``module`` that may have adapters, in the module's order.

    Args:
        module: Stacked experts; see :func:`is_adaptable`.
    """
    found = []
    for key, parameter in module.named_parameters(recurse=False):
        if key in (_first(module), "down_proj") and parameter.ndim == 3:
            num_experts, rows, columns = parameter.shape
            sides = (rows, columns) if module.is_transposed else (columns, rows)
            found.append(
                TargetModule(name=f"{name}.{key}", in_features=sides[0], out_features=sides[1], num_experts=num_experts)
            )
    return tuple(found)


class MultiLoraExperts(SettingsModule):
    """Frozen experts with an adapter per slot and expert. Outside of a schedule they act as the base experts.

    Args:
        operands: Adapters by parameter name; parameters without adapters are left out.
    """

    def __init__(
        self,
        base: nn.Module,
        name: str,
        bank: AdapterBank,
        context: ForwardContext,
        operands: Mapping[str, LoraOperands],
    ) -> None:
        super().__init__(base, name, bank, context)
        self._operands = dict(operands)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # writes to the bank, which is outside of graphs
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *args: Any) -> Tensor:
        schedule = self._context.schedule
        if schedule is None or not schedule.segments:
            result: Tensor = self.base(hidden_states, top_k_index, top_k_weights, *args)
            return result
        places = self._context.places()
        if places is None:
            return self._mixed(hidden_states, top_k_index, top_k_weights, schedule)
        x_TH, experts_TC, weights_TC = (
            places.collect(x.reshape(-1, x.shape[-1])) for x in (hidden_states, top_k_index, top_k_weights)
        )
        return places.spread(self._mixed(x_TH, experts_TC, weights_TC, schedule)).view(hidden_states.shape)

    def _mixed(self, x_TH: Tensor, experts_TC: Tensor, weights_TC: Tensor, schedule: TokenSchedule) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, ``[T, H]``."""
        base: Any = self.base
        num_tokens, num_chosen = experts_TC.shape
        slots_S = schedule.slots_of_tokens(x_TH.device).repeat_interleave(num_chosen)
        group_S = experts_TC.reshape(-1) * self._bank.num_slots + slots_S
        order_S = group_S.argsort(stable=True)
        num_groups = base.num_experts * self._bank.num_slots
        counts = torch.bincount(group_S, minlength=num_groups).tolist()
        scales = dict(zip(schedule.slots, schedule.scales, strict=True))
        groups = range(num_groups)
        sorted_schedule = TokenSchedule.build(
            groups, counts, [scales.get(group % self._bank.num_slots, 0.0) for group in groups]
        )
        tokens = [
            sum(counts[first : first + self._bank.num_slots]) for first in range(0, num_groups, self._bank.num_slots)
        ]
        first = _first(base)
        # Do not index by token: a GPU would sum the gradients with atomics.
        x_SH = x_TH[:, None].expand(-1, num_chosen, -1).reshape(num_tokens * num_chosen, -1)
        hidden_SN = self._project(first, x_SH.index_select(0, order_S), tokens, sorted_schedule)
        hidden_SN = base._apply_gate(hidden_SN) if base.has_gate else base.act_fn(hidden_SN)
        output_SH = self._project("down_proj", hidden_SN, tokens, sorted_schedule)
        if base.has_post_expert_norm:
            output_SH = base.post_expert_norm(output_SH)
        output_SH = output_SH * weights_TC.reshape(-1)[order_S, None]
        in_order_SH = torch.empty_like(output_SH).index_copy(0, order_S, output_SH)
        return in_order_SH.view(num_tokens, num_chosen, -1).sum(1).to(x_TH.dtype)

    def _project(self, key: str, x_SK: Tensor, tokens: Sequence[int], schedule: TokenSchedule) -> Tensor:
        frozen = _FrozenExperts(self.base, key, tokens)
        operands = self._operands.get(key)
        if operands is None:  # an empty schedule runs only the frozen experts
            operands, schedule = next(iter(self._operands.values())), TokenSchedule.build((), (), ())
        (y_SN,) = grouped_lora_linear(x_SK, self._bank.anchor, [frozen], operands, schedule, self._bank.ops)
        return y_SN


class _FrozenExperts:
    """One projection of all experts, for tokens sorted by expert; weights are read at each use."""

    def __init__(self, base: Any, key: str, tokens: Sequence[int]) -> None:
        self._base = base
        self._key = key
        self._spans = list(enumerate(itertools.pairwise(itertools.accumulate(tokens, initial=0))))

    def forward(self, x_SK: Tensor, y_SN: Tensor | None = None) -> Tensor:
        weight_E, bias_EN = getattr(self._base, self._key), self._bias()
        if y_SN is None:
            y_SN = x_SK.new_zeros(x_SK.shape[0], weight_E.shape[2 if self._base.is_transposed else 1])
        for expert, (first, end) in self._spans:
            if first < end:
                weight_NK = weight_E[expert].T if self._base.is_transposed else weight_E[expert]
                bias_N = None if bias_EN is None else bias_EN[expert]
                added_linear(x_SK[first:end], weight_NK, bias_N, y_SN[first:end])
        return y_SN

    def backward(self, dy_SN: Tensor, dx_SK: Tensor | None) -> Tensor:
        weight_E = getattr(self._base, self._key)
        if dx_SK is None:
            dx_SK = dy_SN.new_zeros(dy_SN.shape[0], weight_E.shape[1 if self._base.is_transposed else 2])
        for expert, (first, end) in self._spans:
            if first < end:
                weight_NK = weight_E[expert].T if self._base.is_transposed else weight_E[expert]
                dx_SK[first:end].addmm_(dy_SN[first:end], weight_NK)
        return dx_SK

    def _bias(self) -> Tensor | None:
        bias_EN: Tensor | None = getattr(self._base, f"{self._key}_bias") if self._base.has_bias else None
        return bias_EN


def _first(module: Any) -> str:
    """Return the name of the parameter that multiplies the experts' input."""
    return "gate_up_proj" if module.has_gate else "up_proj"


# Routers of a mixture that hold their weight directly, with an adapter per slot.
#
# Such a router is a linear layer followed by more steps (a softmax, the choice of experts), all in one module. While it
# runs, its weight is replaced by one whose product with the tokens includes the adapters.


class MultiLoraRouter(SettingsModule):
    """A frozen router with one adapter per slot. Outside of a schedule it acts as the base router.

    Args:
        base: The router; its parameter ``weight`` is ``[E, H]``.
    """

    def __init__(
        self, base: nn.Module, name: str, bank: AdapterBank, context: ForwardContext, operands: LoraOperands
    ) -> None:
        super().__init__(base, name, bank, context)
        self._operands = operands

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # writes to the bank, which is outside of graphs
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_in_forward:
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
        base = FrozenWeight(SimpleNamespace(weight=weight_NK, bias=bias_N))
        (y_TN,) = grouped_lora_linear(x_TK, self._bank.anchor, [base], self._operands, schedule, self._bank.ops)
        if places is not None:
            y_TN = places.spread(y_TN)
        return y_TN.view(*x.shape[:-1], -1)
