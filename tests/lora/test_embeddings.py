"""Adapters on token embeddings: every backend against float64 by hand, padded rows, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import SIZES, build_tiny
from kernel_backends import BACKENDS
from peft_adapters import write_random
from safetensors.torch import load_file
from torch import Tensor
from transformers import MambaConfig, MambaForCausalLM

from alto.backbone import Backbone
from alto.errors import TargetModuleError, UnsupportedError, UnsupportedModelError
from alto.executor import model_notes
from alto.kernels import TokenSchedule, choose_backend, slot_embedding_change
from alto.lora import (
    AdapterBank,
    AdapterShape,
    BankLayout,
    adapter_shape,
    eject,
    find_targets,
    inject,
)
from alto.lora.layout import TargetModule
from alto.spec import JobConfig

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
]

VOCABULARY, HIDDEN = 13, 6
TABLE = TargetModule(name="embed", in_features=VOCABULARY, out_features=HIDDEN, is_embedding=True)
SLOTS, LENGTHS, SCALES = (2, 1, 0), (7, 3, 9), (0.5, 2.0, 3.0)
"""Slots, tokens and scales; slot 1 has no adapter on the embeddings."""


def filled_bank(dtype: torch.dtype = torch.float32) -> AdapterBank:
    other = TargetModule(name="other", in_features=5, out_features=8)
    bank = AdapterBank(BankLayout(modules=(other, TABLE), max_rank=8, rank_step=2), 3, dtype=dtype)
    shapes = [
        AdapterShape(rank=4, targets=(other, TABLE)),
        AdapterShape(rank=8, targets=(other,)),
        AdapterShape(rank=8, targets=(other, TABLE), own_ranks=(8, 2), scale_ratios=(1.0, 1.5)),
    ]
    for slot, shape in enumerate(shapes):
        bank.occupy(slot, shape)
    bank.params_ZP.copy_(torch.randn(bank.params_ZP.shape, generator=torch.Generator().manual_seed(0)))
    return bank


def by_hand(bank: AdapterBank, ids_T: Tensor, dy_TH: Tensor, factor: float, padding: int | None) -> Any:
    """Return the change of every token, and the gradients of both matrices by slot, in float64."""
    changes, gradients = [], {}
    parts = zip(SLOTS, SCALES, ids_T.split(LENGTHS), dy_TH.double().split(LENGTHS), strict=True)
    for slot, scale, ids, dy in parts:
        pair = bank.read(slot).get("embed")
        if pair is None:
            changes.append(torch.zeros_like(dy))
            continue
        a, b = (matrix.double().requires_grad_() for matrix in pair)
        ratio = 1.5 if slot == 2 else 1.0
        change = factor * ratio * scale * torch.nn.functional.embedding(ids, a, padding_idx=padding) @ b
        gradients[slot] = torch.autograd.grad(change, (a, b), dy)
        changes.append(change.detach())
    return torch.cat(changes), gradients


def near(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    return float((found.double() - expected.double()).norm() / expected.double().norm()) <= tolerance


@BACKENDS
@pytest.mark.parametrize(("factor", "padding"), [(1.0, None), (2.5, 4)])
def test_change_and_gradients_of_many_slots(ops: Any, factor: float, padding: int | None) -> None:
    bank = filled_bank()
    operands = bank.operands(1, 7)
    # few distinct tokens, so that some are repeated
    ids_T = torch.randint(2, 8, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    assert (ids_T[:7] == 4).any()
    dy_TH = torch.randn(sum(LENGTHS), HIDDEN, generator=torch.Generator().manual_seed(2))
    schedule = TokenSchedule.build(SLOTS, LENGTHS, SCALES)
    found = slot_embedding_change(bank.anchor, ids_T, operands, schedule, ops, factor=factor, padding_idx=padding)
    found.backward(dy_TH)
    expected, gradients = by_hand(bank, ids_T, dy_TH, factor, padding)
    assert near(found.detach(), expected)
    assert not found[7:10].any()
    for slot in (0, 1, 2):
        of_slot = bank.read(slot, bank.grads_ZP)
        assert ("embed" in of_slot) == (slot != 1)
        if slot != 1:
            assert all(near(matrix, wanted) for matrix, wanted in zip(of_slot["embed"], gradients[slot], strict=True))
        assert not any(matrix.any() for matrix in of_slot["other"])
    read = {slot: bank.read(slot, bank.grads_ZP) for slot in (0, 2)}
    touched = sum(matrix.count_nonzero() for weights in read.values() for matrix in weights["embed"])
    assert bank.grads_ZP.count_nonzero() == touched, "nothing is written beside them"


def test_nan_of_one_slot_leaves_every_bit_of_the_others() -> None:
    results = []
    for poison in (False, True):
        bank = filled_bank()
        if poison:
            bank.params_ZP[2].fill_(float("nan"))
        ids_T = torch.arange(sum(LENGTHS)) % VOCABULARY
        schedule = TokenSchedule.build(SLOTS, LENGTHS, SCALES)
        found = slot_embedding_change(bank.anchor, ids_T, bank.operands(1, 7), schedule, choose_backend("torch"))
        found.sum().backward()
        results.append((found.detach()[7:], bank.grads_ZP[:2].clone(), bank.grads_ZP[2].isnan().any()))
    (clean, gradients, _), (beside, others, is_poisoned) = results
    assert is_poisoned
    assert torch.equal(clean, beside)
    assert torch.equal(gradients, others)


class TestPaddedRows:
    """A model that computes a padded row per sequence."""

    def make(self) -> tuple[Backbone, AdapterBank, Any]:
        torch.manual_seed(0)
        model = MambaForCausalLM(MambaConfig(**SIZES, state_size=8)).eval()
        backbone = Backbone(model, None, "tiny")
        assert backbone.is_padded
        targets = find_targets(model, ["embeddings"])
        bank = AdapterBank(BankLayout(modules=targets, max_rank=4), 1)
        context = inject(model, bank, backbone.rows_in_pass)
        bank.occupy(0, AdapterShape(rank=4, targets=targets))
        generator = torch.Generator().manual_seed(3)
        bank.params_ZP.copy_(torch.randn(bank.params_ZP.shape, generator=generator) / 4)
        return backbone, bank, context

    def test_every_sequence_is_what_it_is_alone(self) -> None:
        backbone, bank, context = self.make()
        lengths = [5, 2, 9]
        ids = torch.randint(2, 90, (16,), generator=torch.Generator().manual_seed(1))
        positions = torch.cat([torch.arange(length) for length in lengths])
        weights_TH = torch.randn(16, backbone.model.config.hidden_size, generator=torch.Generator().manual_seed(2))
        results = []
        for parts in ([slice(0, 16)], [slice(0, 5), slice(5, 7), slice(7, 16)]):
            bank.grads_ZP.zero_()
            hidden = []
            for part, of_part in zip(parts, [lengths] if len(parts) == 1 else [[n] for n in lengths], strict=True):
                with context.use(TokenSchedule.build([0], [sum(of_part)], [2.0])):
                    found = backbone.hidden_states(ids[part], positions[part], of_part)
                    (found * weights_TH[part]).sum().backward()
                hidden.append(found.detach())
            results.append((torch.cat(hidden), bank.grads_ZP.clone()))
        (together, gradients), (alone, gradients_alone) = results
        assert near(together, alone)
        assert near(gradients, gradients_alone, 1e-4)
        bare = backbone.hidden_states(ids, positions, lengths).detach()
        assert not near(bare, together, 1e-2), "the adapter changes too little to be seen"


def test_tensors_have_pefts_names_and_sizes(tmp_path: Path) -> None:
    config = JobConfig(r=4, target_modules=["embed_tokens"], rank_pattern={"embed_tokens": 3})
    write_random(build_tiny("llama"), tmp_path, config)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    prefix = "base_model.model.model.embed_tokens.lora_embedding"
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        f"{prefix}_A": (3, 97),
        f"{prefix}_B": (32, 3),
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "with use_dora, found its embeddings"),
        (
            {"loraplus_lr_ratio": 4.0},
            "with loraplus_lr_ratio, found its embeddings, for which PEFT then uses a fixed rate",
        ),
    ],
)
def test_what_is_not_implemented_there_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        adapter_shape(build_tiny("llama"), JobConfig(target_modules=["embed_tokens"], **settings))


def test_other_embeddings_are_not_taken_for_the_tokens_ones() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=4, n_positions=64))
    assert [target.name for target in find_targets(model, ["wte"])] == ["transformer.wte"]
    with pytest.raises(TargetModuleError, match=r"found none under 'wpe'"):
        find_targets(model, ["wpe"])


def test_tied_embeddings_come_with_a_note() -> None:
    (note,) = model_notes(build_tiny("smollm"), [JobConfig(target_modules=["embed_tokens"])], "sft")
    assert note.startswith("The output head and the embeddings of the base model are one weight")


def test_a_model_that_looks_up_other_tokens_is_refused_and_ejection_restores_it() -> None:
    model: Any = build_tiny("llama")
    targets = find_targets(model, ["embed_tokens"])
    bank = AdapterBank(BankLayout(modules=targets, max_rank=2), 1)
    table = model.model.embed_tokens
    context = inject(model, bank)
    bank.occupy(0, AdapterShape(rank=2, targets=targets))
    with (
        context.use(TokenSchedule.build([0], [5], [1.0])),
        pytest.raises(UnsupportedModelError, match="all 5 tokens of a forward pass in one call, found 3"),
    ):
        model.model.embed_tokens(torch.tensor([[1, 2, 3]]))
    eject(model)
    assert model.model.embed_tokens is table
