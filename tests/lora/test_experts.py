"""Adapters on stacked experts: each job among others trains as PEFT's ``target_parameters`` alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import SIZES
from kernel_backends import BACKENDS
from moe_models import MODELS, build_mixture, config_of
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.errors import SpecError, TargetModuleError, UnsupportedModelError
from alto.evaluation.target import loaded_adapters
from alto.kernels import TokenSchedule
from alto.lora import (
    AdapterBank,
    AdapterShape,
    BankLayout,
    ModuleNames,
    eject,
    find_targets,
    inject,
    read_adapter,
    read_saved_adapter,
    write_adapter,
)
from alto.spec import JobConfig

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

LENGTHS = [13, 7, 21]
SLOTS = {2: (3, 2.0, slice(0, 20)), 0: (4, 1.0, slice(20, 41))}
"""Rank, scale and tokens of two jobs; the first job has two sequences."""


def draw() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids, targets = (torch.randint(2, SIZES["vocab_size"], (sum(LENGTHS),), generator=generator) for _ in range(2))
    return ids, torch.cat([torch.arange(length) for length in LENGTHS]), targets


def occupied(model: PreTrainedModel) -> AdapterBank:
    """Return a bank of three slots, two of them with random adapters."""
    config = config_of(model, 1, 1.0)
    targets = find_targets(model, config.target_modules, target_parameters=config.target_parameters)
    bank = AdapterBank(BankLayout(modules=targets, max_rank=4, rank_step=1), 3)
    for slot, (rank, _, _) in SLOTS.items():
        bank.occupy(slot, AdapterShape(rank=rank, targets=targets))
        bank.initialise(slot, slot)
        for number, (_, _, b) in enumerate(bank.matrices(bank.params_ZP, slot)):
            b.copy_(torch.randn(b.shape, generator=torch.Generator().manual_seed(number)) * 0.1)
    return bank


def train(backbone: Backbone, bank: AdapterBank) -> Tensor:
    """Return the losses of all tokens; adapter gradients are in the bank."""
    ids, positions, targets = draw()
    context = inject(backbone.model, bank, backbone.rows_in_pass)
    schedule = TokenSchedule.build(
        list(SLOTS),
        [tokens.stop - tokens.start for *_, tokens in SLOTS.values()],
        [scale for _, scale, _ in SLOTS.values()],
    )
    with context.use(schedule):
        losses = backbone.token_losses(backbone.hidden_states(ids, positions, LENGTHS), targets)
        losses.sum().backward()
    return losses.detach()


@pytest.mark.parametrize("name", MODELS)
def test_every_job_trains_as_peft_trains_it_alone(name: str, tmp_path: Path) -> None:
    own = MODELS[name]()
    backbone = Backbone(copy.deepcopy(own), None, "tiny")
    bank = occupied(backbone.model)
    losses = train(backbone, bank)
    ids, _, targets = draw()
    rows = list(zip(ids.split(LENGTHS), targets.split(LENGTHS), strict=True))
    names = ModuleNames.of(backbone.model)
    for slot, (rank, scale, tokens) in SLOTS.items():
        config = config_of(own, rank, scale)
        weights = bank.read(slot)
        write_adapter(tmp_path / f"{slot}", weights, config, "tiny", names)
        gradients = bank.read(slot, bank.grads_ZP)
        write_adapter(tmp_path / f"gradients-{slot}", gradients, config, "tiny", names)
        found = load_file(tmp_path / f"gradients-{slot}" / "adapter_model.safetensors")

        alone: Any = PeftModel.from_pretrained(copy.deepcopy(own), str(tmp_path / f"{slot}"), is_trainable=True)
        of_job = rows[:2] if slot == 2 else rows[2:]
        loss = sum(
            F.cross_entropy(alone(input_ids=row[None], use_cache=False).logits[0], wanted, reduction="sum")
            for row, wanted in of_job
        )
        loss.backward()
        assert float(losses[tokens].sum()) == pytest.approx(float(loss.detach()), rel=1e-5)
        expected = {key.replace(".default", ""): p.grad for key, p in alone.named_parameters() if p.requires_grad}
        assert found.keys() == expected.keys()
        of_experts = [key for key in expected if ".experts." in key]
        assert of_experts
        of_routers = [key for key in expected if ".gate.lora" in key or ".router.lora" in key]
        assert of_routers
        assert all(expected[key].any() for key in (*of_experts, *of_routers))
        apart = sum(float((found[key] - gradient).square().sum()) for key, gradient in expected.items())
        size = sum(float(gradient.square().sum()) for gradient in expected.values())
        assert (apart / size) ** 0.5 < 1e-4

        back = read_adapter(tmp_path / f"{slot}")
        assert back.keys() == weights.keys()
        assert all(torch.equal(*pair) for key in weights for pair in zip(back[key], weights[key], strict=True))
        saved = read_saved_adapter(tmp_path / f"{slot}")
        assert saved.rank == rank
        assert not saved.has_patterns
        row = of_job[0][0]
        with (
            torch.no_grad(),
            loaded_adapters(backbone, [saved], "tiny") as served,
            served.use(served.schedule([len(row)])),
        ):
            logits = backbone.logits(backbone.hidden_states(row, torch.arange(len(row)), [len(row)]))
            expected_logits = alone(input_ids=row[None], use_cache=False).logits[0]
        assert float((logits - expected_logits).norm() / expected_logits.norm()) < 1e-5


@BACKENDS
def test_every_backend_gives_the_same(ops: Any) -> None:
    backbone = Backbone(build_mixture("mixtral"), None, "tiny")
    expected_bank, bank = occupied(backbone.model), occupied(backbone.model)
    expected = train(backbone, expected_bank)
    bank.ops = ops
    found = train(backbone, bank)
    torch.testing.assert_close(found, expected)
    for slot in SLOTS:
        torch.testing.assert_close(bank.grads_ZP[slot], expected_bank.grads_ZP[slot], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("factor", [3.0, float("nan")], ids=["larger", "nan"])
def test_another_job_changes_rounding_at_most(factor: float) -> None:
    """The other job's tokens go to other experts, so an expert's products have other numbers of rows."""
    backbone = Backbone(build_mixture("mixtral"), None, "tiny")
    bank, other = occupied(backbone.model), occupied(backbone.model)
    before = train(backbone, bank)
    other.params_ZP[0].mul_(factor)
    after = train(backbone, other)
    torch.testing.assert_close(after[:20], before[:20], rtol=1e-6, atol=1e-6)
    gradients, expected = other.grads_ZP[2], bank.grads_ZP[2]
    assert float((gradients - expected).norm() / expected.norm()) < 1e-6
    assert not torch.equal(before[20:], after[20:])


def test_a_slot_is_freed_with_all_of_its_experts() -> None:
    backbone = Backbone(build_mixture("mixtral"), None, "tiny")
    bank = occupied(backbone.model)
    inject(backbone.model, bank)
    bank.release(2)
    operands = [one for _, one in bank._operands if one.params_ZP.shape[0] > 3]
    assert operands
    assert all({number % 3 for number in one.slots} == {0} for one in operands)


def test_injection_is_undone() -> None:
    model = build_mixture("mixtral")
    kinds = [type(module) for module in model.modules()]
    inject(model, occupied(model))
    eject(model)
    assert [type(module) for module in model.modules()] == kinds


class TestTargets:
    def test_endings_select_parameters_of_all_layers(self) -> None:
        model = build_mixture("mixtral")
        found = find_targets(model, [], target_parameters=["experts.down_proj"])
        assert [target.name for target in found] == [f"model.layers.{n}.mlp.experts.down_proj" for n in range(2)]
        assert {target.num_experts for target in found} == {4}

    def test_others_are_refused_by_name(self) -> None:
        with pytest.raises(
            TargetModuleError, match=r"found none under 'experts\.up'; the model has .*experts\.down_proj"
        ):
            find_targets(build_mixture("mixtral"), "all-linear", target_parameters=["experts.up"])

    def test_a_model_without_experts_has_none(self, tiny_model: Any) -> None:
        with pytest.raises(TargetModuleError, match="the model has none that ALTO can adapt"):
            find_targets(tiny_model("llama"), "all-linear", target_parameters=["experts.gate_up_proj"])

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"lora_dropout": 0.1}, "lora_dropout should be 0 with target_parameters"),
            ({"optim": "paged_adamw_8bit"}, "optim should be 'adamw_torch' with target_parameters"),
            ({"target_parameters": ["a", "a"]}, "should name each parameter once"),
            ({"target_parameters": 3}, "should be a list of names of parameters"),
        ],
    )
    def test_settings_that_contradict_it_are_refused(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(SpecError, match=message):
            JobConfig(**({"target_parameters": ["experts.down_proj"]} | changes))

    def test_nothing_to_train_is_refused(self) -> None:
        with pytest.raises(SpecError, match="target_modules should be 'all-linear'"):
            JobConfig(target_modules=[])


def test_a_router_that_does_more_with_its_weight_is_refused() -> None:
    class Normed(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.weight = inner.weight
            self.inner = inner

        def forward(self, x: Tensor) -> Any:
            return F.linear(x, self.weight / self.weight.norm()), *self.inner(x)[1:]

    model = build_mixture("mixtral")
    model.model.layers[0].mlp.gate = Normed(model.model.layers[0].mlp.gate)
    backbone = Backbone(model, None, "tiny")
    with pytest.raises(UnsupportedModelError, match=r"weight of model\.layers\.0\.mlp\.gate only"):
        train(backbone, occupied(model))
