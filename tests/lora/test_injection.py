"""Injecting a bank's adapters into a model and removing them: nothing of an earlier bank remains."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.kernels import TokenSchedule
from alto.lora import (
    AdapterBank,
    AdapterShape,
    BankLayout,
    ForwardContext,
    MultiLoraLinear,
    eject,
    inject,
    linear_modules,
)

IDS = torch.tensor([3, 5, 8, 13, 21])
ModelFactory = Callable[..., PreTrainedModel]


def make_bank(model: PreTrainedModel, max_rank: int, every: int = 1) -> AdapterBank:
    """Return a bank on every ``every``-th linear module with one non-zero adapter."""
    modules = linear_modules(model)[::every]
    bank = AdapterBank(BankLayout(modules=modules, max_rank=max_rank), 1)
    bank.occupy(0, AdapterShape(rank=max_rank, targets=modules))
    bank.initialise(0, 0)
    for _, _, b in bank.matrices(bank.params_ZP, 0):
        b.fill_(0.05)
    return bank


@torch.no_grad()
def hidden(backbone: Backbone, context: ForwardContext | None = None) -> Tensor:
    if context is None:
        return backbone.hidden_states(IDS, torch.arange(5), [5])
    with context.use(TokenSchedule.build([0], [5], [1.0])):
        return backbone.hidden_states(IDS, torch.arange(5), [5])


@pytest.mark.parametrize("architecture", ["llama", "phi"])
def test_eject_gives_back_the_model_as_it_was(tiny_model: ModelFactory, architecture: str) -> None:
    model = tiny_model(architecture)
    backbone = Backbone(model, None, "tiny")
    before, modules = hidden(backbone), dict(model.named_modules())
    context = inject(model, make_bank(model, 4))
    assert not torch.equal(hidden(backbone, context), before)
    eject(model)
    after = dict(model.named_modules())
    assert list(after) == list(modules)
    assert all(after[name] is module for name, module in modules.items())
    assert torch.equal(hidden(backbone), before)


def test_eject_leaves_a_bare_model_alone(tiny_model: ModelFactory) -> None:
    model = tiny_model("llama")
    modules = dict(model.named_modules())
    eject(model)
    assert dict(model.named_modules()) == modules


def test_a_second_bank_takes_the_place_of_the_first(tiny_model: ModelFactory) -> None:
    """The second bank has fewer modules and a larger rank; modules that only the first one wrapped are bare again."""
    model, other = tiny_model("llama"), tiny_model("llama")
    backbone, fresh = Backbone(model, None, "tiny"), Backbone(other, None, "tiny")
    first = inject(model, make_bank(model, 2))
    larger = make_bank(model, 8, every=3)
    second = inject(model, larger)
    wrapped = [name for name, module in model.named_modules() if isinstance(module, MultiLoraLinear)]
    assert wrapped == [module.name for module in larger.layout.modules]
    assert not any(isinstance(model.get_submodule(name).base, MultiLoraLinear) for name in wrapped)
    expected = hidden(fresh, inject(other, make_bank(other, 8, every=3)))
    assert torch.equal(hidden(backbone, second), expected)
    assert torch.equal(hidden(backbone, first), hidden(backbone)), "the first bank still has an effect"


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Switch off the collection of cycles, so that only unreferenced objects are freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
class TestABankIsFreedAtOnce:
    """A bank may take most of a GPU, so it must not wait for Python's garbage collector."""

    @pytest.fixture
    def parts(self, tiny_model: ModelFactory) -> list[object]:
        """Model, backbone and bank after a training pass; the context of the passes is last."""
        model = tiny_model("llama")
        backbone, bank = Backbone(model, None, "tiny"), make_bank(model, 4)
        context = inject(model, bank)
        with context.use(TokenSchedule.build([0], [5], [1.0])):
            backbone.hidden_states(IDS, torch.arange(5), [5]).sum().backward()
        assert bank.grads_ZP.any()
        return [model, backbone, bank, context]

    def test_when_its_model_is_dropped(self, parts: list[object]) -> None:
        bank, model = weakref.ref(parts[2]), weakref.ref(parts[0])
        del parts[:3]
        assert bank() is None
        assert model() is None

    def test_when_it_is_taken_out_of_its_model(self, parts: list[object]) -> None:
        bank, model = weakref.ref(parts[2]), parts[0]
        del parts[2]
        assert bank() is not None
        assert isinstance(model, PreTrainedModel)
        eject(model)
        assert bank() is None
