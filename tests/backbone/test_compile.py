"""Compiled layers give what plain ones give, and are compiled once for all token counts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.errors import UnsupportedError
from alto.kernels import TokenSchedule
from alto.lora import AdapterBank, AdapterShape, BankLayout, find_shared_inputs, inject, linear_modules

ModelFactory = Callable[..., PreTrainedModel]
# Inside PyTorch's compiler a warning of its own, as an error, is a crash.
pytestmark = [pytest.mark.slow("models"), pytest.mark.filterwarnings("default")]
NEEDS_COMPILER = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="PyTorch's compiler needs a C++ compiler"
)


@pytest.fixture(autouse=True)
def forget_compiled() -> Iterator[None]:
    yield
    torch.compiler.reset()


class Adapted:
    """A tiny model with two adapters that do something."""

    def __init__(self, model: PreTrainedModel, **settings: bool) -> None:
        self.backbone = Backbone(model, None, "tiny", **settings)
        modules = linear_modules(model)
        shared = find_shared_inputs(model, self.backbone.run_once)
        self.bank = AdapterBank(BankLayout(modules=modules, max_rank=3, shared_inputs=shared), 2)
        self.context = inject(model, self.bank)
        for slot in range(2):
            self.bank.occupy(slot, AdapterShape(rank=3, targets=modules))
            self.bank.initialise(slot, slot)
            for _, _, b in self.bank.matrices(self.bank.params_ZP, slot):
                b.fill_(0.01)

    def run(self, lengths: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Token losses and adapter gradients of two sequences, one for each adapter."""
        ids = torch.arange(sum(lengths)) % 60 + 2
        positions = torch.cat([torch.arange(length) for length in lengths])
        self.bank.grads_ZP.zero_()
        with self.context.use(TokenSchedule.build([0, 1], lengths, [2.0, 1.0])):
            losses = self.backbone.token_losses(self.backbone.hidden_states(ids, positions, lengths), ids.roll(-1))
            losses.sum().backward()
        return losses.detach(), self.bank.grads_ZP.clone()


@NEEDS_COMPILER
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_losses_and_gradients_are_those_of_the_plain_model(tiny_model: ModelFactory, checkpointing: bool) -> None:
    plain = Adapted(tiny_model("llama"))
    compiled = Adapted(tiny_model("llama"), torch_compile=True, gradient_checkpointing=checkpointing)
    for number, lengths in enumerate([(7, 12), (9, 30), (21, 3)]):
        # Two passes may compile (a first token count, then any); a third is served by what is there.
        with torch._dynamo.config.patch(error_on_recompile=number == 2):
            losses, gradients = compiled.run(lengths)
        expected_losses, expected_gradients = plain.run(lengths)
        torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6)
        assert float((gradients - expected_gradients).norm() / expected_gradients.norm()) < 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"


def test_without_a_compiler_it_is_refused(tiny_model: ModelFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"torch_compile: expected a C\+\+ compiler.* remove the key"):
        Backbone(tiny_model("llama"), None, "tiny", torch_compile=True)
