"""Places of a group's adapters: views and table against a tiling of the row that the test makes itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from alto.kernels import GradientTiles, LoraOperands
from alto.kernels.operands import VECTOR_SIZE

K, MAX_RANK = 6, 5


def numbered(num_slots: int, row_size: int) -> Tensor:
    """Return a bank in which every number is its own place in its row."""
    return torch.arange(row_size).double().expand(num_slots, row_size).contiguous()


def make_operands(num_slots: int, out_features: Sequence[int]) -> LoraOperands:
    """Return an empty group in a bank whose rows fit one adapter of the largest rank on all members."""
    row_size = MAX_RANK * sum(K + n for n in out_features)
    return LoraOperands(
        number=3,
        in_features=K,
        out_features=out_features,
        params_ZP=numbered(num_slots, row_size),
        grads_ZP=-numbered(num_slots, row_size),
        max_rank=MAX_RANK,
    )


def lay_end_to_end(operands: LoraOperands, slot: int, ranks: Sequence[int], start: int) -> int:
    """Place ``A`` and then every ``B`` from ``start`` on without gaps; return the end."""
    sizes = [K * sum(ranks), *(rank * n for rank, n in zip(ranks, operands.out_features, strict=True))]
    a_start, *b_starts, end = accumulate(sizes, initial=start)
    operands.assign(slot, ranks, a_start, b_starts)
    return end


@st.composite
def occupancies(draw: st.DrawFn) -> tuple[LoraOperands, list[list[int]], list[tuple[int, int]]]:
    """Draw a group with occupied slots, the ranks of every slot, and the span of each slot's adapter in its row."""
    out_features = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    num_slots = draw(st.integers(1, 4))
    operands = make_operands(num_slots, out_features)
    all_ranks, spans = [], []
    for slot in range(num_slots):
        rank = draw(st.integers(1, MAX_RANK))
        ranks = [rank * draw(st.booleans()) for _ in out_features]
        spare = operands.params_ZP.shape[1] - sum(r * (K + n) for r, n in zip(ranks, out_features, strict=True))
        start = draw(st.integers(0, spare))
        all_ranks.append(ranks)
        spans.append((start, lay_end_to_end(operands, slot, ranks, start)))
    return operands, all_ranks, spans


@given(occupancy=occupancies())
def test_views_tile_a_slot_s_part_of_its_row(
    occupancy: tuple[LoraOperands, list[list[int]], list[tuple[int, int]]],
) -> None:
    operands, all_ranks, spans = occupancy
    assert operands.slots.keys() == {slot for slot, ranks in enumerate(all_ranks) if any(ranks)}
    for slot, matrices in operands.slots.items():
        start, end = spans[slot]
        for sign, views in ((1, (matrices.a_KQ, *matrices.bs)), (-1, (matrices.da_KQ, *matrices.dbs))):
            # Every number is its place, so this checks that the span is complete, in order, and without repetition.
            found = torch.cat([view.flatten() for view in views])
            assert torch.equal(found, sign * torch.arange(start, end).double())
        ranks = all_ranks[slot]
        assert matrices.a_KQ.shape == matrices.da_KQ.shape == (K, sum(ranks)) == (K, matrices.width)
        shapes = [(rank, n) for rank, n in zip(ranks, operands.out_features, strict=True)]
        assert [view.shape for view in matrices.bs] == [view.shape for view in matrices.dbs] == shapes
        assert [last - first for first, last in matrices.columns] == ranks
        assert [column for first, last in matrices.columns for column in range(first, last)] == [*range(sum(ranks))]


@given(occupancy=occupancies())
def test_the_table_says_where_the_views_are(
    occupancy: tuple[LoraOperands, list[list[int]], list[tuple[int, int]]],
) -> None:
    operands, all_ranks, _ = occupancy
    row_size, table = operands.params_ZP.shape[1], operands.table()
    assert table.dtype == torch.int64
    for slot, (ranks, row) in enumerate(zip(all_ranks, table.tolist(), strict=True)):
        matrices = operands.slots.get(slot)
        if matrices is None:
            assert not any(row)
            continue
        members = [row[2:][start : start + 3] for start in range(0, 3 * len(ranks), 3)]
        assert row[:2] == [matrices.width, matrices.a_KQ.storage_offset() - slot * row_size]
        assert [rank for _, rank, _ in members] == ranks
        for (first, rank, b_start), b_RN, columns in zip(members, matrices.bs, matrices.columns, strict=True):
            assert (first, first + rank) == columns
            assert not rank or b_start == b_RN.storage_offset() - slot * row_size


def test_who_comes_and_goes_is_in_the_next_table() -> None:
    operands = make_operands(3, [4, 2])
    assert not operands.table().any()
    lay_end_to_end(operands, 1, [2, 2], 5)
    # Q and A; then first column, rank and B of every member; then sums of squares, of which there are none.
    assert operands.table().tolist() == [[0] * 11, [4, 5, 0, 2, 29, 2, 2, 37, 0, 0, 0], [0] * 11]
    lay_end_to_end(operands, 2, [0, 1], 0)
    assert operands.table()[1:].tolist() == [[4, 5, 0, 2, 29, 2, 2, 37, 0, 0, 0], [1, 0, 0, 0, 6, 0, 1, 6, 0, 0, 0]]
    operands.clear(1)
    assert operands.slots.keys() == {2}
    assert not operands.table()[1].any()


def test_a_new_adapter_takes_the_place_of_the_old() -> None:
    operands = make_operands(2, [4, 2])
    lay_end_to_end(operands, 0, [3, 3], 0)
    lay_end_to_end(operands, 0, [1, 0], 2)
    assert operands.slots[0].width == 1
    assert operands.table()[0].tolist() == [1, 2, 0, 1, 8, 1, 0, 12, 0, 0, 0]
    lay_end_to_end(operands, 0, [0, 0], 0)
    assert not operands.slots, "a slot that targets no member is absent"
    assert not operands.table().any()


def test_clearing_an_empty_slot_is_nothing() -> None:
    operands = make_operands(1, [4])
    operands.clear(0)
    assert not operands.slots


def test_the_table_is_sent_once_until_a_slot_changes() -> None:
    operands = make_operands(2, [4])
    lay_end_to_end(operands, 0, [2], 0)
    assert operands.table() is operands.table()


def test_views_see_what_is_written_to_the_bank_and_write_to_it() -> None:
    operands = make_operands(2, [4])
    lay_end_to_end(operands, 1, [2], 0)
    operands.params_ZP[1] = 7.0
    operands.slots[1].da_KQ.fill_(9.0)
    assert (operands.slots[1].a_KQ == 7.0).all()
    assert (operands.grads_ZP[1, : 2 * K] == 9.0).all()


def test_the_widest_slot_targets_every_member_with_the_largest_rank() -> None:
    assert make_operands(1, [4, 2, 3]).max_width == 3 * MAX_RANK


def test_alignment_is_what_every_start_row_and_column_has_in_common() -> None:
    operands = LoraOperands(
        number=3,
        in_features=K,
        out_features=[32, 16],
        params_ZP=numbered(2, 1024),
        grads_ZP=numbered(2, 1024),
        max_rank=16,
    )
    lay_end_to_end(operands, 0, [16, 16], 64)
    assert operands.alignment == VECTOR_SIZE
    lay_end_to_end(operands, 1, [0, 4], 8)
    assert operands.alignment == 4, "the rank"
    lay_end_to_end(operands, 1, [0, 16], 2)
    assert operands.alignment == 2, "the start"
    operands.clear(1)
    assert operands.alignment == 2, "a leaving slot changes nothing"
    assert make_operands(1, [3]).alignment == 1, "the columns of a B"


def test_the_table_says_where_sums_of_squares_start() -> None:
    rows_ZP = torch.zeros(2, 4000)
    operands = LoraOperands(
        number=0,
        in_features=K,
        out_features=[64, 300],
        params_ZP=rows_ZP,
        grads_ZP=rows_ZP,
        max_rank=4,
        sums_ZC=torch.zeros(2, 99),
        tiles=GradientTiles(wide=64, narrow=3, many=7, wide_of_many=K),
    )
    operands.assign(1, [3, 4], 0, [100, 1000], sums_start=10)
    # A: up to 8 columns, so tiles of K features; 7 ranks in tiles of 3. B: 1 and 5 tiles of 64 features.
    assert operands.table()[1, 8:].tolist() == [10, 10 + 3, 10 + 3 + 1]
    assert GradientTiles(64, 3, 7, K).num_sums(K, [64, 300], [3, 4], 4) == (3, 1, 2 * 5)
