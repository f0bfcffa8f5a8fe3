"""Injection: wrapped modules apply each slot's own adapter, and equal the base where no slot adapts them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.kernels import DropoutKey, TokenSchedule
from alto.lora import (
    AdapterBank,
    AdapterShape,
    AdapterWeights,
    BankLayout,
    ForwardContext,
    TargetModule,
    find_targets,
    inject,
)
from alto.lora import linear_modules as all_modules

# PEFT reads a transformers property by its deprecated name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

IDS = torch.tensor([3, 5, 8, 13, 21, 34, 55, 89])
POSITIONS = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
LENGTHS = [5, 3]
ModelFactory = Callable[..., PreTrainedModel]


def with_adapters(
    model: PreTrainedModel, adapters: list[tuple[int, tuple[TargetModule, ...]]]
) -> tuple[Backbone, AdapterBank, ForwardContext]:
    """Return a backbone with one adapter per slot (rank, targets), whose ``B`` is random instead of zero."""
    targeted = {module for _, targets in adapters for module in targets}
    modules = tuple(module for module in all_modules(model) if module in targeted)
    backbone = Backbone(model, None, "tiny")
    bank = AdapterBank(BankLayout(modules=modules, max_rank=max(rank for rank, _ in adapters)), len(adapters))
    context = inject(model, bank)
    for slot, (rank, targets) in enumerate(adapters):
        bank.occupy(slot, AdapterShape(rank=rank, targets=targets))
        bank.initialise(slot, slot)
        generator = torch.Generator().manual_seed(rank)
        weights = {
            name: (a, 0.1 * torch.randn(b.shape, generator=generator)) for name, (a, b) in bank.read(slot).items()
        }
        bank.write(slot, AdapterWeights(weights))
    return backbone, bank, context


def targets_of(model: PreTrainedModel, names: str | list[str]) -> tuple[TargetModule, ...]:
    return find_targets(model, names)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "llama-bias"])
def test_each_slot_gives_what_peft_gives(tiny_model: ModelFactory, architecture: str) -> None:
    model = tiny_model(architecture)
    adapters = [(4, targets_of(model, "all-linear")), (2, targets_of(model, ["q_proj", "down_proj"]))]
    backbone, bank, context = with_adapters(model, adapters)
    scales = (2.0, 0.5)
    with context.use(TokenSchedule.build([1, 0], LENGTHS, [scales[1], scales[0]])):
        together = backbone.hidden_states(IDS, POSITIONS, LENGTHS)
    for slot, part in ((1, slice(0, 5)), (0, slice(5, 8))):
        rank, targets = adapters[slot]
        settings = LoraConfig(
            r=rank, lora_alpha=rank * scales[slot], target_modules=[module.name for module in targets]
        )
        peft = get_peft_model(tiny_model(architecture), settings)
        for name, (a, b) in bank.read(slot).items():
            wrapped = peft.get_submodule(f"base_model.model.{name}")
            wrapped.lora_A["default"].weight.copy_(a.T)
            wrapped.lora_B["default"].weight.copy_(b.T)
        expected = peft.base_model.model.model(input_ids=IDS[part][None], use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(together[part], expected, rtol=1e-4, atol=1e-5)
        bare = tiny_model(architecture).model(input_ids=IDS[part][None], use_cache=False).last_hidden_state[0]
        assert float((together[part] - bare).norm() / bare.norm()) > 1e-2, "the adapter changes too little to be seen"


@torch.no_grad()
def test_outside_a_pass_the_model_is_the_base(tiny_model: ModelFactory) -> None:
    model = tiny_model("llama")
    expected = Backbone(tiny_model("llama"), None, "tiny").hidden_states(IDS, POSITIONS, LENGTHS)
    backbone, _, context = with_adapters(model, [(4, targets_of(model, "all-linear"))])
    with context.use(TokenSchedule.build([0], [8], [1.0])):
        assert not torch.equal(backbone.hidden_states(IDS, POSITIONS, LENGTHS), expected)
    assert torch.equal(backbone.hidden_states(IDS, POSITIONS, LENGTHS), expected)


def test_a_pass_ends_when_its_body_raises() -> None:
    context, schedule = ForwardContext(), TokenSchedule.build([0], [1], [1.0])
    with pytest.raises(ZeroDivisionError), context.use(schedule):
        _ = 1 / 0
    with context.use(schedule):
        assert context.schedule is schedule
        with pytest.raises(AssertionError, match="do not nest"), context.use(schedule):
            pass


def test_nothing_of_the_base_is_trained(tiny_model: ModelFactory) -> None:
    model = tiny_model("llama")
    backbone, bank, context = with_adapters(model, [(4, targets_of(model, "all-linear"))])
    with context.use(TokenSchedule.build([0], [8], [1.0])):
        backbone.hidden_states(IDS, POSITIONS, LENGTHS).square().sum().backward()
    assert all(not parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert all(a.any() and b.any() for _, a, b in bank.matrices(bank.grads_ZP, 0)), "a module got no gradient"


def test_dropout_of_a_job_does_not_depend_on_what_other_jobs_target(tiny_model: ModelFactory) -> None:
    """A task's bank holds the modules of all its jobs, on which a job's masks must not depend."""
    schedule = TokenSchedule.build([0], [8], [1.0], [DropoutKey(0.5, 1, 2)])
    results = []
    for names_of_other in (["v_proj"], "all-linear"):
        model = tiny_model("llama")
        adapters = [(4, targets_of(model, ["v_proj", "up_proj"])), (4, targets_of(model, names_of_other))]
        backbone, bank, context = with_adapters(model, adapters)
        with context.use(schedule):
            hidden = backbone.hidden_states(IDS, POSITIONS, LENGTHS)
            hidden.square().sum().backward()
        results.append(
            (hidden.detach(), [matrix.clone() for _, *ab in bank.matrices(bank.grads_ZP, 0) for matrix in ab])
        )
    (hidden, gradients), (other_hidden, other_gradients) = results
    torch.testing.assert_close(hidden, other_hidden, rtol=1e-6, atol=1e-6)
    for left, right in zip(gradients, other_gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
