"""Token ranges of slots: laid end to end, in order, without the slots that have no tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.errors import ShapeError
from alto.kernels import DropoutKey, Segment, TokenSchedule

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
