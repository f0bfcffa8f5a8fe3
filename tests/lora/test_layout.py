"""Where modules lie in a row of the bank."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from alto.lora import AdapterBank, BankLayout, TargetModule


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
    assert layout.b_spans() == [(12, 20), (40, 68)]
    assert layout.row_size == 68
