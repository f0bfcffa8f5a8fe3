"""Adapters on the output head: logits, losses and gradients of every slot against float64 by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import build_tiny
from kernel_backends import BACKENDS
from peft import PeftModel
from peft_adapters import logits_of, save_with_peft
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from alto.backbone import Backbone, output_head
from alto.errors import TargetModuleError, UnsupportedError, UnsupportedModelError
from alto.evaluation.target import loaded_adapters
from alto.executor import model_notes
from alto.kernels import TokenSchedule
from alto.lora import (
    AdapterBank,
    AdapterShape,
    AdapterWeights,
    BankLayout,
    ForwardContext,
    adaptable,
    adapter_shape,
    eject,
    find_targets,
    inject,
    read_saved_adapter,
)
from alto.records import LabelSet
from alto.spec import JobConfig

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
]

SLOTS, SCALES, LENGTHS, COUNTS = (2, 3, 1, 0), (0.5, 3.0, 2.0, 1.0), (5, 6, 9, 7), (4, 3, 6, 7)
"""Slots in token order with scale, tokens and trained tokens; slot 1 has no adapter on the head, slot 3 only that
one."""

IDS = torch.tensor([[3, 5, 8, 13, 21], [34, 55, 89, 1, 2]])


def with_heads(model: PreTrainedModel) -> tuple[Backbone, AdapterBank, ForwardContext]:
    head, body = find_targets(model, ["lm_head"]), find_targets(model, ["q_proj"])
    adapters = [(4, (*body, *head)), (8, body), (2, (*body, *head)), (6, head)]
    modules = tuple(module for module in adaptable(model) if module in {*body, *head})
    backbone = Backbone(model, None, "tiny")
    bank = AdapterBank(BankLayout(modules=modules, max_rank=8, rank_step=2), len(adapters))
    context = inject(model, bank)
    generator = torch.Generator().manual_seed(0)
    for slot, (rank, targets) in enumerate(adapters):
        bank.occupy(slot, AdapterShape(rank=rank, targets=targets))
        drawn = {
            name: (torch.randn(a.shape, generator=generator) / 4, torch.randn(b.shape, generator=generator) / 4)
            for name, (a, b) in bank.read(slot).items()
        }
        bank.write(slot, AdapterWeights(drawn))
    return backbone, bank, context


def tokens() -> Any:
    """Return tokens of which each job's last ones are trained."""
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    positions = [torch.arange(end - count, end) for end, count in zip(ends, COUNTS, strict=True)]
    return SimpleNamespace(slots=SLOTS, job_tokens=LENGTHS, job_targets=COUNTS, loss_positions_S=torch.cat(positions))


def drawn_states(backbone: Backbone) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, targets, and distinct gradients of the losses."""
    generator = torch.Generator().manual_seed(1)
    hidden_SH = torch.randn(sum(COUNTS), backbone.model.config.hidden_size, generator=generator)
    targets_S = torch.randint(0, backbone.model.config.vocab_size, (sum(COUNTS),), generator=generator)
    return hidden_SH.requires_grad_(), targets_S, torch.linspace(-1.0, 2.0, sum(COUNTS))


def by_hand(
    backbone: Backbone, bank: AdapterBank, hidden_SH: Tensor, targets_S: Tensor, upstream_S: Tensor
) -> tuple[Tensor, Tensor, dict[tuple[int, str], Tensor]]:
    """Return losses, the gradient of the hidden states and those of every slot's matrices, in float64."""
    head: Any = backbone.model.get_output_embeddings()
    cap = getattr(backbone.model.config, "final_logit_softcapping", None)
    hidden = hidden_SH.detach().double().requires_grad_()
    matrices, losses = {}, []
    for slot, scale, part, targets in zip(SLOTS, SCALES, hidden.split(COUNTS), targets_S.split(COUNTS), strict=True):
        bias = None if head.base.bias is None else head.base.bias.double()
        logits = F.linear(part, head.base.weight.double(), bias)
        if "lm_head" in bank.read(slot):
            a, b = (matrix.double().requires_grad_() for matrix in bank.read(slot)["lm_head"])
            matrices |= {(slot, "A"): a, (slot, "B"): b}
            logits = logits + scale * (part @ a @ b)
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        losses.append(F.cross_entropy(logits, targets, reduction="none"))
    losses_S = torch.cat(losses)
    gradients = torch.autograd.grad(losses_S, [hidden, *matrices.values()], upstream_S.double())
    return losses_S, gradients[0], dict(zip(matrices, gradients[1:], strict=True))


def near(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    return float((found - expected).detach().double().norm() / expected.detach().double().norm()) <= tolerance


@contextmanager
def chunks_of(size: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_head, "_chunk_tokens", lambda *_: size)
        yield


# gemma2's logits are capped, phi's head has a bias
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("architecture", ["llama", "gemma2-plain-attention", "phi"])
def test_losses_and_gradients_of_many_slots(architecture: str, chunk: int) -> None:
    assert_equal_by_hand(architecture, chunk)


@BACKENDS
def test_every_backend_computes_them(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alto.lora.bank.choose_backend", lambda **_: ops)
    assert_equal_by_hand("llama", 3)


def assert_equal_by_hand(architecture: str, chunk: int) -> None:
    backbone, bank, context = with_heads(build_tiny(architecture))
    hidden_SH, targets_S, upstream_S = drawn_states(backbone)
    with chunks_of(chunk), context.use(TokenSchedule.build(SLOTS, LENGTHS, SCALES)):
        losses_S = backbone.token_losses(hidden_SH, targets_S, tokens())
        losses_S.backward(upstream_S)
    expected, gradient_SH, matrices = by_hand(backbone, bank, hidden_SH, targets_S, upstream_S)
    assert losses_S.dtype == torch.float32
    assert hidden_SH.grad is not None
    assert near(losses_S.detach(), expected)
    assert near(hidden_SH.grad, gradient_SH)
    found = {(slot, which): matrix for slot in SLOTS for which, matrix in gradients_of(bank, slot).items()}
    assert found.keys() == matrices.keys()
    assert all(near(found[key], matrices[key]) for key in found)


def gradients_of(bank: AdapterBank, slot: int) -> dict[str, Tensor]:
    """Return the gradients of the head, which a slot may lack."""
    pair = bank.read(slot, bank.grads_ZP).get("lm_head")
    return {} if pair is None else dict(zip("AB", pair, strict=True))


@pytest.mark.parametrize("mistake", ["zeros", "swapped slots", "another scale"])
def test_the_comparison_bites(mistake: str) -> None:
    backbone, bank, context = with_heads(build_tiny("llama"))
    hidden_SH, targets_S, upstream_S = drawn_states(backbone)
    expected, gradient_SH, _ = by_hand(backbone, bank, hidden_SH, targets_S, upstream_S)
    slots = (0, 3, 1, 2) if mistake == "swapped slots" else SLOTS
    scales = [1.01 * scale for scale in SCALES] if mistake == "another scale" else SCALES
    if mistake == "zeros":
        bank.params_ZP.zero_()
    moved = tokens()
    moved.slots = slots
    with context.use(TokenSchedule.build(slots, LENGTHS, scales)):
        losses_S = backbone.token_losses(hidden_SH, targets_S, moved)
        losses_S.backward(upstream_S)
    assert hidden_SH.grad is not None
    assert not near(losses_S.detach(), expected, 1e-4)
    assert not near(hidden_SH.grad, gradient_SH, 1e-4)


def test_slots_without_an_adapter_on_the_head_keep_every_bit() -> None:
    """Logits are computed once, as for a base whose head nobody adapts."""
    backbone, bank, context = with_heads(build_tiny("llama"))
    hidden_SH, targets_S, upstream_S = drawn_states(backbone)
    with context.use(TokenSchedule.build(SLOTS, LENGTHS, SCALES)):
        losses_S = backbone.token_losses(hidden_SH, targets_S, tokens())
        losses_S.backward(upstream_S)
    part = slice(sum(COUNTS[:2]), sum(COUNTS[:3]))
    alone = hidden_SH.detach()[part].requires_grad_()
    weight_VH = backbone.model.lm_head.base.weight
    expected = output_head.token_losses(alone, weight_VH, targets_S[part])
    expected.backward(upstream_S[part])
    assert SLOTS[2] == 1
    assert torch.equal(losses_S[part], expected)
    assert hidden_SH.grad is not None
    assert torch.equal(hidden_SH.grad[part], alone.grad)
    assert not gradients_of(bank, 1)


def test_without_a_forward_pass_of_adapters_the_head_is_the_bases() -> None:
    backbone, _, context = with_heads(build_tiny("llama"))
    hidden_SH, targets_S, _ = drawn_states(backbone)
    bare = Backbone(build_tiny("llama"), None, "tiny")
    assert torch.equal(backbone.token_losses(hidden_SH, targets_S), bare.token_losses(hidden_SH, targets_S))
    with context.use(TokenSchedule.build((), (), ())):
        found = backbone.token_losses(hidden_SH, targets_S, SimpleNamespace(slots=(), job_tokens=(), job_targets=()))
    assert torch.equal(found, bare.token_losses(hidden_SH, targets_S))
    eject(backbone.model)
    assert isinstance(backbone.model.lm_head, torch.nn.Linear)


def test_a_hidden_state_that_needs_no_gradient_leaves_those_of_the_adapters() -> None:
    backbone, bank, context = with_heads(build_tiny("llama"))
    hidden_SH, targets_S, upstream_S = drawn_states(backbone)
    with context.use(TokenSchedule.build(SLOTS, LENGTHS, SCALES)):
        backbone.token_losses(hidden_SH.detach(), targets_S, tokens()).backward(upstream_S)
    _, _, matrices = by_hand(backbone, bank, hidden_SH, targets_S, upstream_S)
    assert all(near(gradients_of(bank, slot)[which], matrix) for (slot, which), matrix in matrices.items())


def test_16_bit_bases_get_the_gradients_of_their_rounded_logits() -> None:
    backbone, bank, context = with_heads(build_tiny("llama").bfloat16())
    hidden_SH, targets_S, upstream_S = drawn_states(backbone)
    hidden = hidden_SH.detach().bfloat16().requires_grad_()
    with context.use(TokenSchedule.build(SLOTS, LENGTHS, SCALES)):
        losses_S = backbone.token_losses(hidden, targets_S, tokens())
        losses_S.backward(upstream_S * 1e-9)  # far below float16's range, and near the end of bfloat16's
    expected, gradient_SH, matrices = by_hand(backbone, bank, hidden, targets_S, upstream_S * 1e-9)
    assert near(losses_S.detach(), expected, 1e-2)
    assert hidden.grad is not None
    assert near(hidden.grad, gradient_SH, 3e-2)
    assert all(near(gradients_of(bank, slot)[which], matrix, 3e-2) for (slot, which), matrix in matrices.items())


class TestTheModelsOwnLogits:
    @torch.no_grad()
    @pytest.mark.parametrize("kept", [0, 1, 2])
    def test_they_have_the_adapters_also_where_few_positions_are_kept(self, kept: int, tmp_path: Path) -> None:
        one = save_with_peft(build_tiny("llama"), tmp_path / "one", seed=2, r=8, target_modules=["lm_head"])
        other = save_with_peft(build_tiny("llama"), tmp_path / "other", seed=3, target_modules=["q_proj", "lm_head"])
        expected = [
            PeftModel.from_pretrained(build_tiny("llama"), folder).eval()(input_ids=IDS[row][None]).logits[0]
            for row, folder in enumerate((one, other))
        ]
        backbone = Backbone(build_tiny("llama"), None, "tiny")
        adapters = [read_saved_adapter(folder) for folder in (one, other)]
        with (
            loaded_adapters(backbone, adapters, "tiny") as served,
            backbone.own_attention(),
            served.use(served.schedule([5, 5])),
        ):
            found = backbone.model(input_ids=IDS, use_cache=False, logits_to_keep=kept).logits
        assert near(found, torch.stack(expected)[:, -kept:].double())

    def test_positions_of_unknown_slots_are_refused(self) -> None:
        backbone, _, context = with_heads(build_tiny("llama"))
        with (
            context.use(TokenSchedule.build([0, 1], [3, 5], [1.0, 1.0])),
            pytest.raises(UnsupportedModelError, match="same number of tokens of every row, found 2"),
        ):
            backbone.model.lm_head(torch.zeros(1, 2, 32))


@torch.no_grad()
def test_an_adapter_that_peft_saved_with_the_weight_of_another_base_is_refused(tmp_path: Path) -> None:
    save_with_peft(build_tiny("llama"), tmp_path, target_modules=["lm_head", "q_proj"])
    assert not read_saved_adapter(tmp_path).weights.extras
    other = build_tiny("llama")
    other.lm_head.weight[7] += 1.0
    with pytest.raises(TargetModuleError, match=r"expected lm_head\.weight, .* of a different base"):
        logits_of(Backbone(other, None, "other"), IDS, tmp_path)


class TestTargets:
    @pytest.mark.parametrize("names", [["lm_head"], r".*(q_proj|lm_head)", ["model.layers.0.mlp.up_proj", "lm_head"]])
    def test_the_choice_is_pefts(self, names: str | list[str]) -> None:
        from peft import LoraConfig, get_peft_model

        peft = get_peft_model(build_tiny("llama"), LoraConfig(r=2, target_modules=names, task_type="CAUSAL_LM"))
        expected = {
            name.removeprefix("base_model.model.") for name, module in peft.named_modules() if hasattr(module, "lora_A")
        }
        assert {target.name for target in find_targets(build_tiny("llama"), names)} == expected
        assert "lm_head" in expected

    def test_a_job_that_targets_it_changes_no_number_of_another_modules_masks(self) -> None:
        names = [target.name for target in adaptable(build_tiny("llama"))]
        assert names[-2:] == ["lm_head", "model.embed_tokens"]  # after all modules that are numbered already

    @pytest.mark.parametrize(
        ("settings", "name", "message"),
        [
            ({"use_dora": True}, "llama", "with use_dora, found its output head"),
            ({"bias": "lora_only"}, "phi", "with bias: lora_only, found its output head, whose bias is not trained"),
        ],
    )
    def test_what_is_not_implemented_there_is_refused(self, settings: dict[str, Any], name: str, message: str) -> None:
        with pytest.raises(UnsupportedError, match=message):
            adapter_shape(build_tiny(name), JobConfig(target_modules=["lm_head", "q_proj"], **settings))

    def test_a_classifier_has_another_head(self) -> None:
        labels = LabelSet(problem_type="single_label_classification", names=("a", "b"))
        with pytest.raises(UnsupportedError, match="which a classification head replaces; leave it out"):
            adapter_shape(build_tiny("llama"), JobConfig(target_modules=["lm_head"]), labels)

    def test_a_tied_head_comes_with_a_note(self) -> None:
        on_head, elsewhere = JobConfig(target_modules=["lm_head"]), JobConfig()
        (note,) = model_notes(build_tiny("smollm"), [elsewhere, on_head], "sft")
        assert note.startswith("The output head and the embeddings of the base model are one weight")
        assert model_notes(build_tiny("smollm"), [elsewhere], "sft") == ()
        assert model_notes(build_tiny("llama"), [on_head], "sft") == ()


def test_a_name_near_it_is_suggested() -> None:
    with pytest.raises(
        TargetModuleError, match=r"did you mean 'lm_head'\? .* up_proj, v_proj, embed_tokens, lm_head, a full name"
    ):
        find_targets(build_tiny("llama"), ["lmhead"])
