"""The blocks of a pass: each in one segment, together all tokens; sent to the device once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alto.kernels import TokenSchedule, pass_table
from alto.kernels.pass_table import BLOCK_TOKENS

CPU = torch.device("cpu")


@given(st.lists(st.sampled_from([0, 1, 5, BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS]), max_size=6))
def test_blocks_tile_the_tokens_and_keep_to_their_segment(counts: list[int]) -> None:
    schedule = TokenSchedule.build(range(len(counts)), counts, [1.0] * len(counts))
    table = schedule.table(CPU)
    blocks, segments = table.blocks_B3.tolist(), table.segments_S3.tolist()
    assert (table.num_blocks, table.num_segments) == (len(blocks), len(segments))
    assert [token for _, first, end in blocks for token in range(first, end)] == list(range(schedule.num_tokens))
    assert segments == [list(segment) for segment in schedule.segments]
    ranges = {slot: range(start, end + 1) for slot, start, end in segments}
    assert all(first in ranges[slot] and end in ranges[slot] for slot, first, end in blocks)
    assert all(0 < end - first <= BLOCK_TOKENS for _, first, end in blocks)


def test_scales_are_found_by_slot() -> None:
    schedule = TokenSchedule.build([3, 0, 1], [2, 4, 0], [2.0, 0.5, 9.0])
    assert schedule.table(CPU).scales_Z.tolist() == [0.5, 0.0, 0.0, 2.0]


def test_a_pass_sends_its_tables_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, upload = [], pass_table.upload
    monkeypatch.setattr(pass_table, "upload", lambda *args: sent.append(args) or upload(*args))
    schedule = TokenSchedule.build([0, 1], [2, 3], [1.0, 2.0])
    for _ in range(3):
        table = schedule.table(CPU)
        assert table.ranks([4, 0]).tolist() == [4, 0]
        assert table.ranks((8, 8)).tolist() == [8, 8]
    assert len(sent) == 4, "segments, scales, and two sorts of ranks"


def test_ranks_that_change_are_seen() -> None:
    """A bank keeps one list a module, and changes it as jobs come and go."""
    table, ranks = TokenSchedule.build([0], [2], [1.0]).table(CPU), [4, 0]
    assert table.ranks(ranks).tolist() == [4, 0]
    ranks[1] = 2
    assert table.ranks(ranks).tolist() == [4, 2]


def test_a_schedule_with_a_table_equals_one_without() -> None:
    one, other = (TokenSchedule.build([0], [2], [1.0]) for _ in range(2))
    one.table(CPU)
    assert one == other
    assert hash(one) == hash(other)
