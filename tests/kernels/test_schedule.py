"""Token ranges of slots, and the blocks of a pass: each lies in one segment, together they cover all tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alto.errors import ShapeError
from alto.kernels import DropoutKey, Segment, TokenSchedule, forward_table
from alto.kernels.dropout import kept_factor, stream_key, threshold
from alto.kernels.forward_table import BLOCK_TOKENS, CHUNK_TOKENS

KEY = DropoutKey(probability=0.1, seed=1, step=2)


def test_slots_without_tokens_are_left_out_with_all_that_belongs_to_them() -> None:
    schedule = TokenSchedule.build([3, 0, 5], [2, 0, 4], [1.0, 2.0, 3.0], [None, KEY, KEY])
    assert schedule.num_tokens == 6
    assert schedule.segments == (Segment(3, 0, 2), Segment(5, 2, 6))
    assert schedule.scales == (1.0, 3.0)
    assert schedule.dropout == (None, KEY)


def test_a_probability_of_zero_is_no_dropout() -> None:
    assert TokenSchedule.build([0], [1], [1.0], [DropoutKey(0.0, 1, 2)]).dropout == (None,)


@given(st.lists(st.integers(0, 9), max_size=6))
def test_segments_tile_the_tokens(counts: list[int]) -> None:
    schedule = TokenSchedule.build(range(len(counts)), counts, [1.0] * len(counts))
    covered = [token for _, start, end in schedule.segments for token in range(start, end)]
    assert covered == list(range(sum(counts))) == list(range(schedule.num_tokens))
    assert [(slot, end - start) for slot, start, end in schedule.segments] == [
        (slot, count) for slot, count in enumerate(counts) if count
    ]


@pytest.mark.parametrize(
    ("num_tokens", "scales", "dropout", "found"),
    [
        ([1], [1.0, 1.0], None, "found 1, 2 and 2"),
        ([1, 1], [1.0], None, "found 2, 1 and 2"),
        ([1, 1], [1.0, 1.0], [None], "found 2, 2 and 1"),
    ],
)
def test_lengths_must_agree(num_tokens: list[int], scales: list[float], dropout: list[None], found: str) -> None:
    with pytest.raises(ShapeError, match=found):
        TokenSchedule.build([0, 1], num_tokens, scales, dropout)


def test_a_slot_may_not_appear_twice() -> None:
    with pytest.raises(ShapeError, match=r"once in a forward pass, found \[1, 1\]"):
        TokenSchedule.build([1, 1], [2, 3], [1.0, 1.0])


CPU = torch.device("cpu")


@given(st.lists(st.sampled_from([0, 1, 5, BLOCK_TOKENS, BLOCK_TOKENS + 1, CHUNK_TOKENS + 1]), max_size=6))
def test_blocks_tile_the_tokens_and_keep_to_their_segment(counts: list[int]) -> None:
    schedule = TokenSchedule.build(range(len(counts)), counts, [1.0] * len(counts))
    table = schedule.table(CPU)
    segments = table.segments_S6.tolist()
    assert table.num_segments == len(segments)
    assert segments == [[*segment, 0, 0, 0] for segment in schedule.segments]
    ranges = {slot: range(start, end + 1) for slot, start, end, *_ in segments}
    for rows, number, most in (
        (table.blocks_B6, table.num_blocks, BLOCK_TOKENS),
        (table.chunks_C6, table.num_chunks, CHUNK_TOKENS),
    ):
        blocks = rows.tolist()
        assert number == len(blocks)
        assert [token for _, first, end, *_ in blocks for token in range(first, end)] == [*range(schedule.num_tokens)]
        assert all(first in ranges[slot] and end in ranges[slot] for slot, first, end, *_ in blocks)
        assert all(0 < end - first <= most for _, first, end, *_ in blocks)
        assert all(place == first - ranges[slot].start for slot, first, _, place, *_ in blocks)


def test_items_are_the_blocks_of_each_segment_and_then_its_tiles() -> None:
    table = TokenSchedule.build([4, 1], [130, 3], [1.0, 1.0]).table(CPU)
    blocks = [[-1, 0, 4, 0, 128, 0], [-1, 0, 4, 128, 130, 0], [-1, 1, 1, 130, 133, 0]]
    tiles = [
        [[tile, segment, slot, *ends, 0] for tile in (0, 1)] for segment, (slot, *ends) in enumerate(table._segments)
    ]
    assert table.items(128, 2).tolist() == [*blocks[:2], *tiles[0], blocks[2], *tiles[1]]
    assert table.items(128, 0).tolist() == blocks
    assert table.items(0, 2).tolist() == [*tiles[0], *tiles[1]]
    assert table.items(128, 2) is table.items(128, 2)


def test_factors_are_found_by_slot() -> None:
    key = DropoutKey(probability=0.5, seed=1, step=2)
    schedule = TokenSchedule.build([3, 0, 1], [2, 4, 0], [2.0, 0.5, 9.0], [key, None, None])
    assert schedule.table(CPU).factors_Z2.tolist() == [[0.5, 1.0], [0.0, 0.0], [0.0, 0.0], [2.0, 2.0]]


@pytest.mark.parametrize("seed", range(8))
def test_every_block_of_a_segment_has_the_bits_of_its_dropout(seed: int) -> None:
    """For some of eight seeds the keys have their highest bit set, and so has the threshold."""
    key = DropoutKey(probability=0.75, seed=seed, step=5)
    table = TokenSchedule.build([1, 0], [BLOCK_TOKENS + 1, 2], [1.0, 1.0], [key, None]).table(CPU)
    bits = [[number % 2**32 for number in block[4:]] for block in table.blocks_B6.tolist()]
    own = [stream_key(key), threshold(key)]
    assert bits == [own, own, [0, 0]]
    assert [[number % 2**32 for number in row[4:]] for row in table.segments_S6.tolist()] == [own, [0, 0]]
    assert table.factors_Z2[1, 1] == kept_factor(key) == 4.0
    assert table.has_dropout


def test_a_pass_without_dropout_says_so() -> None:
    assert not TokenSchedule.build([0, 1], [2, 3], [1.0, 2.0]).table(CPU).has_dropout


def test_a_pass_sends_its_tables_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, upload = [], forward_table.upload
    monkeypatch.setattr(forward_table, "upload", lambda *args: sent.append(args) or upload(*args))
    schedule = TokenSchedule.build([0, 1], [2, 3], [1.0, 2.0])
    assert schedule.table(CPU) is schedule.table(CPU)
    assert len(sent) == 4, "blocks, chunks, segments, and factors"


def test_a_schedule_with_a_table_equals_one_without() -> None:
    one, other = (TokenSchedule.build([0], [2], [1.0]) for _ in range(2))
    one.table(CPU)
    assert one == other
    assert hash(one) == hash(other)
