"""Where modules lie in a row of the bank, and what ``target_modules`` means."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from alto.errors import TargetModuleError
from alto.lora import AdapterBank, BankLayout, TargetModule, find_targets, linear_modules

LEAVES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def modules(tiny_model: Callable[..., PreTrainedModel]) -> tuple[TargetModule, ...]:
    return linear_modules(tiny_model("llama"))


def leaves(found: tuple[TargetModule, ...]) -> list[str]:
    return [module.name.rsplit(".", 1)[-1] for module in found]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4),
    max_rank=st.integers(1, 4),
    num_slots=st.integers(1, 3),
)
def test_views_tile_a_row_exactly(sizes: list[tuple[int, int]], max_rank: int, num_slots: int) -> None:
    targets = tuple(TargetModule(name=f"m{i}", in_features=k, out_features=n) for i, (k, n) in enumerate(sizes))
    layout = BankLayout(modules=targets, max_rank=max_rank)
    bank = AdapterBank(layout, num_slots)
    for index, (k, n) in enumerate(sizes):
        operands = bank.operands(index, index)
        assert operands.a_ZKR.shape == operands.da_ZKR.shape == (num_slots, k, max_rank)
        assert operands.b_ZRN.shape == operands.db_ZRN.shape == (num_slots, max_rank, n)
        if num_slots > 1:
            assert operands.a_ZKR.stride(0) == operands.b_ZRN.stride(0) == layout.row_size
        for view in (operands.a_ZKR, operands.b_ZRN):
            assert view.untyped_storage().data_ptr() == bank.params_ZP.untyped_storage().data_ptr()
            view += 1.0
        for view in (operands.da_ZKR, operands.db_ZRN):
            assert view.untyped_storage().data_ptr() == bank.grads_ZP.untyped_storage().data_ptr()
            view += 1.0
    # A gap would leave a zero, an overlap a two.
    assert torch.equal(bank.params_ZP, torch.ones(num_slots, layout.row_size))
    assert torch.equal(bank.grads_ZP, torch.ones(num_slots, layout.row_size))


def test_offsets_are_a_before_b_in_the_order_of_the_modules() -> None:
    targets = tuple(TargetModule(name=str(k), in_features=k, out_features=n) for k, n in ((3, 2), (5, 7)))
    layout = BankLayout(modules=targets, max_rank=4)
    assert layout.offsets() == [(0, 12), (20, 40)]
    assert layout.row_size == 68


def test_all_linear_is_every_linear_module_but_the_head(modules: tuple[TargetModule, ...]) -> None:
    found = find_targets(modules, "all-linear", 4)
    assert found == modules
    assert leaves(found) == LEAVES * 2
    sizes = {module.name.rsplit(".", 1)[-1]: (module.in_features, module.out_features) for module in found}
    assert (sizes["k_proj"], sizes["up_proj"], sizes["down_proj"]) == ((32, 16), (32, 48), (48, 32))


@pytest.mark.parametrize("head", ["lm_head", ["q_proj", "lm_head"]])
def test_the_head_cannot_be_targeted(modules: tuple[TargetModule, ...], head: str | list[str]) -> None:
    with pytest.raises(TargetModuleError, match="'lm_head'"):
        find_targets(modules, head, 4)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("q_proj", ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]),
        (["model.layers.1.mlp.up_proj"], ["model.layers.1.mlp.up_proj"]),
        (["1.mlp.up_proj", "0.self_attn.v_proj"], ["model.layers.0.self_attn.v_proj", "model.layers.1.mlp.up_proj"]),
        (["self_attn.k_proj"], ["model.layers.0.self_attn.k_proj", "model.layers.1.self_attn.k_proj"]),
        (["v_proj", "model.layers.0.self_attn.v_proj"], [f"model.layers.{i}.self_attn.v_proj" for i in (0, 1)]),
    ],
)
def test_names_match_whole_or_from_a_dot_in_the_models_order(
    modules: tuple[TargetModule, ...], names: str | list[str], found: list[str]
) -> None:
    assert [module.name for module in find_targets(modules, names, 4)] == found


@pytest.mark.parametrize("name", ["proj", "query", "layers.2.mlp.up_proj", "self_attn", "all_linear"])
def test_a_name_that_matches_nothing_is_told_what_the_model_has(modules: tuple[TargetModule, ...], name: str) -> None:
    with pytest.raises(TargetModuleError) as caught:
        find_targets(modules, ["q_proj", name], 4)
    assert repr(name) in str(caught.value)
    assert ", ".join(sorted(LEAVES)) in str(caught.value)
    assert "'all-linear'" in str(caught.value)


def test_a_rank_above_the_smaller_side_names_the_module(modules: tuple[TargetModule, ...]) -> None:
    assert find_targets(modules, "all-linear", 16)
    assert find_targets(modules, "q_proj", 32)
    with pytest.raises(TargetModuleError, match=r"at most 16.*layers\.0\.self_attn\.k_proj \(32 × 16\), found 17"):
        find_targets(modules, "all-linear", 17)


def test_a_model_without_linear_modules_is_refused() -> None:
    """GPT-2 is built of ``Conv1D``; an adapter on none of its modules would train nothing."""
    sizes = {"vocab_size": 20, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    for names in ("all-linear", ["c_attn"]):
        with pytest.raises(TargetModuleError, match="found none"):
            find_targets(linear_modules(model), names, 4)
