"""Models whose sequences are padded rows: places of tokens, prefixes, gradients, isolation, recomputed layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import SIZES
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

from alto.backbone import Backbone
from alto.backbone.sequences import PaddedRows
from alto.kernels import DropoutKey, TokenSchedule
from alto.lora import AdapterBank, AdapterShape, BankLayout, inject, linear_modules

LENGTHS = [9, 1, 17, 4]
CPU = torch.device("cpu")


def bloom() -> PreTrainedModel:
    torch.manual_seed(0)
    return BloomForCausalLM(BloomConfig(**SIZES, n_layer=2, n_head=4)).eval()


def mamba() -> PreTrainedModel:
    torch.manual_seed(0)
    return MambaForCausalLM(MambaConfig(**SIZES, state_size=8)).eval()


PADDED = {"bloom": bloom, "mamba": mamba}


def draw(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    ids = torch.randint(2, SIZES["vocab_size"], (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return ids, torch.cat([torch.arange(length) for length in lengths])


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().double().norm() / expected.detach().double().norm())


class TestPlaces:
    def test_every_token_has_its_place(self) -> None:
        rows = PaddedRows([2, 3], [0, 0], CPU)
        assert rows.shape == (2, 3)
        assert rows.num_positions == 6
        assert rows.spread_ids(torch.tensor([5, 6, 7, 8, 9]), 0).tolist() == [[5, 6, 0], [7, 8, 9]]
        assert rows.mask_SL.tolist() == [[1, 1, 0], [1, 1, 1]]
        assert rows.collect(torch.arange(6.0)[:, None])[:, 0].tolist() == [0, 1, 3, 4, 5]

    def test_a_prefix_is_in_both_rows_and_collected_once(self) -> None:
        rows = PaddedRows([3, 2, 1], [0, 2, 0], CPU)  # the second continues after the first two tokens of the first
        assert rows.spread_ids(torch.tensor([1, 2, 3, 4, 5, 6]), 0).tolist() == [
            [1, 2, 3, 0],
            [1, 2, 4, 5],
            [6, 0, 0, 0],
        ]
        assert rows.mask_SL.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
        assert rows.collect(torch.arange(12.0)[:, None])[:, 0].tolist() == [0, 1, 2, 6, 7, 8]

    def test_spread_and_collect_are_inverse_and_gradients_of_a_prefix_add_up(self) -> None:
        rows = PaddedRows([3, 2], [0, 2], CPU)
        x_TN = torch.randn(5, 4, requires_grad=True)
        spread = rows.spread(x_TN)
        assert torch.equal(rows.collect(spread), x_TN)
        assert not spread[3].any()
        spread.sum().backward()
        assert x_TN.grad is not None
        assert x_TN.grad[:, 0].tolist() == [2, 2, 1, 1, 1]


def step(
    backbone: Backbone, lengths: list[int], *, seed: int = 0, prefixes: list[int] | None = None, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return losses and adapter gradients of a step of two jobs; the last two sequences are the second job's."""
    model, modules = backbone.model, linear_modules(backbone.model)
    bank = AdapterBank(BankLayout(modules=modules, max_rank=3), 2)
    context = inject(model, bank, backbone.rows_in_pass)
    for slot in range(2):
        bank.occupy(slot, AdapterShape(rank=3, targets=modules))
        bank.initialise(slot, slot)
        for number, (_, _, b) in enumerate(bank.matrices(bank.params_ZP, slot)):
            b.copy_(torch.randn(b.shape, generator=torch.Generator().manual_seed(number)) * 0.1)
    ids, _ = draw(lengths, seed)
    starts = prefixes or [0] * len(lengths)
    positions = torch.cat([torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)])
    keys = [DropoutKey(dropout, slot, 0, 0) for slot in range(2)]
    counts = [sum(lengths[:-2]), sum(lengths[-2:])]
    with context.use(TokenSchedule.build([0, 1], counts, [2.0, 1.0], keys)):
        hidden = backbone.hidden_states(ids, positions, lengths, prefixes)
        losses = backbone.token_losses(hidden, ids.roll(-1))
        losses.sum().backward()
    return losses.detach(), bank.grads_ZP.clone()


@pytest.mark.parametrize("name", PADDED)
def test_a_job_has_the_same_bits_of_gradients_whatever_pads_it(name: str) -> None:
    """The other job's rows are longer in the second pass, so that the first job's rows get more padding."""
    backbone = Backbone(PADDED[name](), None, "tiny")
    assert backbone.is_padded
    short, short_gradients = step(backbone, [9, 5, 4, 3], dropout=0.3)
    long, long_gradients = step(backbone, [9, 5, 30, 3], dropout=0.3)
    assert relative(long[:14], short[:14]) < 1e-6
    assert relative(long_gradients[0], short_gradients[0]) < 1e-5
    assert relative(long_gradients[1], short_gradients[1]) > 1e-2


@pytest.mark.parametrize("name", PADDED)
def test_a_shared_prompt_is_as_a_prompt_of_its_own(name: str) -> None:
    """Losses and adapter gradients of both replies agree; the second continues after six tokens of the first
    sequence."""
    backbone = Backbone(PADDED[name](), None, "tiny")
    modules = linear_modules(backbone.model)
    ids, _ = draw([9, 4])
    targets = ids.roll(-1)

    def train(row_ids: Tensor, lengths: list[int], prefixes: list[int], kept: Tensor) -> tuple[Tensor, Tensor]:
        bank = AdapterBank(BankLayout(modules=modules, max_rank=2), 1)
        context = inject(backbone.model, bank, backbone.rows_in_pass)
        bank.occupy(0, AdapterShape(rank=2, targets=modules))
        row = bank.params_ZP[0]
        row.copy_(torch.randn(row.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
        positions = torch.cat([torch.arange(p, p + n) for p, n in zip(prefixes, lengths, strict=True)])
        with context.use(TokenSchedule.build([0], [sum(lengths)], [1.0])):
            hidden = backbone.hidden_states(row_ids, positions, lengths, prefixes)
            losses = backbone.token_losses(hidden[kept], targets)
            losses.sum().backward()
        return losses.detach(), bank.grads_ZP[0].clone()

    shared = train(ids, [9, 4], [0, 6], torch.arange(13))
    of_replies = torch.cat([torch.arange(9), torch.arange(15, 19)])
    whole = train(torch.cat([ids[:9], ids[:6], ids[9:]]), [9, 10], [0, 0], of_replies)
    assert relative(shared[0], whole[0]) < 1e-6
    assert relative(shared[1], whole[1]) < 1e-5
    alone = train(ids, [9, 4], [0, 0], torch.arange(13))
    assert relative(alone[1], whole[1]) > 1e-2


def test_recomputed_layers_give_the_same_gradients() -> None:
    plain = step(Backbone(bloom(), None, "tiny"), LENGTHS)
    recomputed = step(Backbone(bloom(), None, "tiny", gradient_checkpointing=True), LENGTHS)
    assert all(map(torch.equal, plain, recomputed))


def test_transposed_weights_train_as_those_of_linear_layers() -> None:
    """GPT-2 keeps ``[K, N]`` in a Conv1D; it runs packed, because its attention can be replaced."""

    def build(**changes: Any) -> PreTrainedModel:
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(**(SIZES | {"n_layer": 2, "n_head": 4, "n_embd": 32} | changes))).eval()

    backbone = Backbone(build(), None, "tiny")
    assert not backbone.is_padded
    shapes = {
        module.name.rsplit(".", 1)[-1]: (module.in_features, module.out_features)
        for module in linear_modules(backbone.model)
    }
    assert shapes["c_attn"] == (32, 96)
    losses, gradients = step(backbone, LENGTHS)
    other = build()
    for name, module in list(other.named_modules()):
        if type(module).__name__ == "Conv1D":
            linear = torch.nn.Linear(*module.weight.shape)
            linear.weight.data, linear.bias.data = module.weight.data.T.contiguous(), module.bias.data
            other.set_submodule(name, linear)
    expected, expected_gradients = step(Backbone(other, None, "tiny"), LENGTHS)
    assert relative(losses, expected) < 1e-6
    assert relative(gradients, expected_gradients) < 1e-5


def test_modules_that_see_only_some_tokens_are_refused() -> None:
    from alto.errors import UnsupportedModelError

    class Half(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            halves = x.chunk(2, dim=1)
            return torch.cat([self.inner(half) for half in halves], dim=1)

    make: Callable[[], PreTrainedModel] = bloom
    model = make()
    layer = model.transformer.h[0].mlp
    layer.dense_h_to_4h = Half(layer.dense_h_to_4h)
    backbone = Backbone(model, None, "tiny")
    with pytest.raises(UnsupportedModelError, match="leave out layers that see only some tokens"):
        step(backbone, LENGTHS)
