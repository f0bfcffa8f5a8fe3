"""Modules that read the same input are found and share one computation; others stay correct."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.kernels import LoraOperands, TokenSchedule, choose_backend
from alto.lora import (
    AdapterBank,
    AdapterShape,
    BankLayout,
    ForwardContext,
    TargetModule,
    find_shared_inputs,
    inject,
    linear_modules,
)
from alto.lora.dora import Dora
from alto.lora.linear import FrozenWeight, MultiLoraLinear, SharedInput

ModelFactory = Callable[..., PreTrainedModel]
LAYER = "model.layers.0"


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("llama", [("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")]),
        ("phi3", []),
        ("phi", [("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.fc1")]),
    ],
)
def test_what_shares_an_input_is_seen(
    tiny_model: ModelFactory, architecture: str, expected: list[tuple[str, ...]]
) -> None:
    backbone = Backbone(tiny_model(architecture), None, "tiny")
    found = find_shared_inputs(backbone.model, backbone.run_once)
    of_layer = [names for names in found if names[0].startswith(LAYER)]
    assert of_layer == [tuple(f"{LAYER}.{name}" for name in names) for names in expected]
    assert len(found) == len(expected) * backbone.model.config.num_hidden_layers


def test_it_is_the_same_with_adapters_injected_and_leaves_no_hook(tiny_model: ModelFactory) -> None:
    backbone = Backbone(tiny_model("llama"), None, "tiny")
    before = find_shared_inputs(backbone.model, backbone.run_once)
    inject(backbone.model, AdapterBank(BankLayout(modules=linear_modules(backbone.model), max_rank=2), 1))
    assert find_shared_inputs(backbone.model, backbone.run_once) == before
    assert not any(module._forward_pre_hooks for module in backbone.model.modules())


class Calls:
    def __init__(self) -> None:
        self._ops = choose_backend("torch")
        self.shrinks = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._ops, name)

    def grouped_shrink(self, x_TK: Tensor, operands: LoraOperands, schedule: TokenSchedule) -> Tensor:
        self.shrinks += 1
        return self._ops.grouped_shrink(x_TK, operands, schedule)


class Pair:
    """Two layers that read one input, with a non-zero adapter, and the same layers apart."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        bases = [nn.Linear(6, 5).requires_grad_(False), nn.Linear(6, 4).requires_grad_(False)]
        modules = tuple(TargetModule(name=name, in_features=6, out_features=n) for name, n in (("q", 5), ("k", 4)))
        bank = AdapterBank(BankLayout(modules=modules, max_rank=3, shared_inputs=(("q", "k"),)), 1)
        self.context, self.calls, self.bank = ForwardContext(), Calls(), bank
        bank.ops = self.calls
        weights, operands = tuple(map(FrozenWeight, bases)), bank.operands(0, 0)
        none = [None] * len(bases)
        dora = Dora(weights, operands, none)
        shared = SharedInput(weights, bank, operands, self.context, none, dora)
        self.layers = [MultiLoraLinear(base, f"{member}", shared, member) for member, base in enumerate(bases)]
        bank.occupy(0, AdapterShape(rank=3, targets=modules))
        bank.params_ZP.normal_()
        self.matrices = [(base, a, b) for base, (_, a, b) in zip(bases, bank.matrices(bank.params_ZP, 0), strict=True)]

    def expected(self, member: int, x: Tensor) -> Tensor:
        base, a, b = self.matrices[member]
        return base(x) + x @ a @ b


def test_one_computation_serves_all_readers_of_a_tensor() -> None:
    pair, x = Pair(), torch.randn(7, 6)
    with pair.context.use(TokenSchedule.build([0], [7], [1.0])):
        for _ in range(2):
            for member in (1, 0):
                torch.testing.assert_close(pair.layers[member](x), pair.expected(member, x))
    assert pair.calls.shrinks == 2, "one per round"


def test_another_tensor_is_not_mistaken_for_the_one_at_hand() -> None:
    pair, x, other = Pair(), torch.randn(7, 6), torch.randn(7, 6)
    with pair.context.use(TokenSchedule.build([0], [7], [1.0])):
        torch.testing.assert_close(pair.layers[0](x), pair.expected(0, x))
        torch.testing.assert_close(pair.layers[1](other), pair.expected(1, other))
        torch.testing.assert_close(pair.layers[1](x), pair.expected(1, x))
        torch.testing.assert_close(pair.layers[1](x), pair.expected(1, x))


def test_unused_outputs_do_not_outlive_the_pass() -> None:
    """A tensor that is changed in place between passes is the same object with other values."""
    pair, x = Pair(), torch.randn(7, 6)
    schedule = TokenSchedule.build([0], [7], [1.0])
    with pair.context.use(schedule):
        pair.layers[0](x)
    x.mul_(2.0)
    with pair.context.use(schedule):
        torch.testing.assert_close(pair.layers[1](x), pair.expected(1, x))


def test_gradients_of_all_readers_meet_in_the_input() -> None:
    pair, x = Pair(), torch.randn(7, 6, requires_grad=True)
    with pair.context.use(TokenSchedule.build([0], [7], [1.0])):
        sum(layer(x).square().sum() for layer in pair.layers).backward()
    found, x.grad = x.grad, None
    sum(pair.expected(member, x).square().sum() for member in range(2)).backward()
    torch.testing.assert_close(found, x.grad)
