"""Compiled layers compute what plain layers compute, and are compiled once for all token counts."""

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
# Inside PyTorch's compiler one of its own warnings, turned into an error, is a crash.
pytestmark = [pytest.mark.slow("models"), pytest.mark.filterwarnings("default")]
NEEDS_COMPILER = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="PyTorch's compiler needs a C++ compiler"
)


@pytest.fixture(autouse=True)
def forget_compiled() -> Iterator[None]:
    yield
    torch.compiler.reset()


class Adapted:
    """A tiny model with two non-zero adapters on the modules whose names end in one of ``suffixes``."""

    def __init__(self, model: PreTrainedModel, suffixes: tuple[str, ...] = ("",), **settings: bool) -> None:
        self.backbone = Backbone(model, None, "tiny", **settings)
        modules = linear_modules(model)
        shared = find_shared_inputs(model, self.backbone.run_once)
        self.bank = AdapterBank(BankLayout(modules=modules, max_rank=3, shared_inputs=shared), 2)
        self.context = inject(model, self.bank)
        targets = tuple(module for module in modules if module.name.endswith(suffixes))
        for slot in range(2):
            self.bank.occupy(slot, AdapterShape(rank=3, targets=targets))
            self.bank.initialise(slot, slot)
            for _, _, b in self.bank.matrices(self.bank.params_ZP, slot):
                b.fill_(0.01)

    def run(self, lengths: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return token losses and adapter gradients of two sequences, one per adapter."""
        self.bank.grads_ZP.zero_()
        with self.context.use(TokenSchedule.build([0, 1], lengths, [2.0, 1.0])):
            losses = self._token_losses(lengths)
            losses.sum().backward()
        return losses.detach(), self.bank.grads_ZP.clone()

    def losses(self, lengths: tuple[int, int]) -> Tensor:
        """Return token losses of two sequences, one per adapter."""
        with self.context.use(TokenSchedule.build([0, 1], lengths, [2.0, 1.0])):
            return self._token_losses(lengths)

    def _token_losses(self, lengths: tuple[int, int]) -> Tensor:
        ids = torch.arange(sum(lengths)) % 60 + 2
        positions = torch.cat([torch.arange(length) for length in lengths])
        return self.backbone.token_losses(self.backbone.hidden_states(ids, positions, lengths), ids.roll(-1))


@NEEDS_COMPILER
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_losses_and_gradients_are_those_of_the_plain_model(tiny_model: ModelFactory, checkpointing: bool) -> None:
    plain = Adapted(tiny_model("llama"))
    compiled = Adapted(tiny_model("llama"), torch_compile=True, gradient_checkpointing=checkpointing)
    for number, lengths in enumerate([(7, 12), (9, 30), (21, 3)]):
        # Two passes may compile (the first token count, then any count); the third must reuse their code.
        with torch._dynamo.config.patch(error_on_recompile=number == 2):
            losses, gradients = compiled.run(lengths)
        expected_losses, expected_gradients = plain.run(lengths)
        torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6)
        assert float((gradients - expected_gradients).norm() / expected_gradients.norm()) < 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"


@NEEDS_COMPILER
def test_adapters_are_inside_of_what_is_compiled(tiny_model: ModelFactory) -> None:
    """A layer is compiled in parts around its attention: the first norm; q, k, v and rotations; o; the second norm and
    the MLP. Other layers reuse them, or the versions for any number of tokens."""
    compiled = Adapted(tiny_model("llama"), torch_compile=True)
    num_layers = compiled.backbone.model.config.num_hidden_layers
    calls = [_num_applied(graph) for graph in _graphs_of(compiled)]
    assert calls[:4] == [0, 1, 1, 2]
    assert len(calls) < 4 * num_layers
    assert compiled.context.graph_groups == (4 * num_layers, 4 * num_layers)


@NEEDS_COMPILER
def test_a_group_of_which_no_slot_has_an_adapter_is_the_frozen_layers(tiny_model: ModelFactory) -> None:
    targets = ("q_proj", "down_proj")
    compiled, plain = Adapted(tiny_model("llama"), targets, torch_compile=True), Adapted(tiny_model("llama"), targets)
    (losses, gradients), (expected_losses, expected_gradients) = compiled.run((9, 4)), plain.run((9, 4))
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6)
    assert float((gradients - expected_gradients).norm() / expected_gradients.norm()) < 1e-5
    assert expected_gradients.norm() > 0


@NEEDS_COMPILER
def test_evaluation_needs_no_gradient(tiny_model: ModelFactory) -> None:
    compiled, plain = Adapted(tiny_model("llama"), torch_compile=True), Adapted(tiny_model("llama"))
    with torch.no_grad():
        torch.testing.assert_close(compiled.losses((7, 12)), plain.losses((7, 12)), rtol=1e-5, atol=1e-6)


def test_without_a_compiler_it_is_refused(tiny_model: ModelFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"torch_compile: expected a C\+\+ compiler.* remove the key"):
        Backbone(tiny_model("llama"), None, "tiny", torch_compile=True)


def _graphs_of(compiled: Adapted) -> list[torch.fx.GraphModule]:
    """Return the graphs compiled in a first pass, in the order of computation."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    for layer in compiled.backbone.model.model.layers:
        layer.compile(backend=backend, dynamic=True)
    compiled.run((7, 12))
    return graphs


def _num_applied(graph: torch.fx.GraphModule) -> int:
    return sum("autograd_function_apply" in node.name for node in graph.graph.nodes)
