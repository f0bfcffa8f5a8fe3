"""The split and the order of rows: fixed by their seeds, complete, and the same for every way of access."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.data import DataOrder
from alto.data.source import carve_rows, sample_rows, split_rows
from alto.errors import DataError

seeds = st.integers(0, 2**32 - 1)


@given(st.integers(2, 60), st.floats(0.001, 0.999), seeds)
def test_split_is_disjoint_complete_ordered_and_fixed(count: int, share: float, seed: int) -> None:
    training, validation = split_rows(range(count), share, seed)
    assert sorted(training + validation) == list(range(count))
    assert training == sorted(training)
    assert validation == sorted(validation)
    assert len(validation) == min(count - 1, max(1, round(share * count)))
    assert split_rows(range(count), share, seed) == (training, validation)


def test_split_differs_between_seeds_and_leaves_the_global_generator_alone() -> None:
    state = random.getstate()
    assert len({tuple(split_rows(range(100), 0.1, seed)[1]) for seed in range(10)}) == 10
    assert random.getstate() == state


@pytest.mark.parametrize("rows", [[], ["one"]])
def test_split_needs_two_rows(rows: list[str]) -> None:
    with pytest.raises(DataError, match=rf"at least 2 rows to split, found {len(rows)}; add rows or name a validation"):
        split_rows(rows, 0.5, 0)


@given(st.integers(1, 50), st.integers(1, 60), seeds)
def test_sample_keeps_order(count: int, wanted: int, seed: int) -> None:
    sample = sample_rows(range(count), wanted, seed)
    assert len(sample) == min(wanted, count)
    assert sample == sorted(set(sample))
    assert sample_rows(range(count), wanted, seed) == sample


def test_sample_of_none_is_everything() -> None:
    assert sample_rows([3, 1, 2], None, 0) == [3, 1, 2]


@given(st.integers(1, 40), st.integers(1, 45), seeds)
def test_every_epoch_is_a_permutation_whose_last_batch_is_what_is_left(rows: int, batch: int, seed: int) -> None:
    order = DataOrder(rows, batch, seed)
    per_epoch = -(-rows // batch)
    for epoch in range(3):
        batches = [order.rows_of_step(epoch * per_epoch + step) for step in range(per_epoch)]
        assert sorted(row for rows_ in batches for row in rows_) == list(range(rows))
        assert [len(rows_) for rows_ in batches[:-1]] == [batch] * (per_epoch - 1)
        assert len(batches[-1]) == rows - batch * (per_epoch - 1)


@given(st.integers(1, 40), st.integers(1, 45), seeds, st.lists(st.integers(0, 200), min_size=1, max_size=12))
def test_random_access_equals_sequential(rows: int, batch: int, seed: int, steps: list[int]) -> None:
    sequential, jumping = DataOrder(rows, batch, seed), DataOrder(rows, batch, seed)
    in_order = [sequential.rows_of_step(step) for step in range(max(steps) + 1)]
    assert [jumping.rows_of_step(step) for step in steps] == [in_order[step] for step in steps]


def test_order_differs_between_epochs_and_seeds_and_not_with_the_batch_size() -> None:
    def epoch(seed: int, number: int, batch: int = 50) -> tuple[int, ...]:
        order, per_epoch = DataOrder(50, batch, seed), -(-50 // batch)
        steps = range(number * per_epoch, (number + 1) * per_epoch)
        return tuple(row for step in steps for row in order.rows_of_step(step))

    assert len({epoch(seed, number) for seed in range(5) for number in range(5)}) == 25
    assert epoch(1, 2) == epoch(1, 2, batch=7)


def test_carved_parts_are_disjoint_in_order_and_fixed_by_the_seed() -> None:
    parts = carve_rows(range(100), (30, 20, 10), 42)
    assert [len(part) for part in parts] == [30, 20, 10]
    assert all(part == sorted(part) for part in parts)
    assert len({row for part in parts for row in part}) == 60
    assert carve_rows(range(100), (30, 20, 10), 42) == parts
    assert carve_rows(range(100), (30, 20, 10), 7) != parts
