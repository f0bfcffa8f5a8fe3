"""Shares of tasks in one executor: by weight, no wanted slot stays idle, no task starves because of another's long
rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.scheduler import TokenShares, jain_index, slot_shares, task_weights

names = st.sampled_from(["a", "b", "c", "d", "e"])
weights = st.floats(0.1, 10.0)


@given(st.dictionaries(names, st.integers(0, 20), min_size=1), st.data(), st.integers(0, 30))
def test_slots_are_all_given_and_none_beyond_what_is_wanted(
    wanted: dict[str, int], data: st.DataObject, num_slots: int
) -> None:
    weight_of = {task: data.draw(weights) for task in wanted}
    shares = slot_shares(wanted, weight_of, num_slots)
    assert list(shares) == list(wanted)
    assert sum(shares.values()) == min(num_slots, sum(wanted.values()))
    for task, share in shares.items():
        assert 0 <= share <= wanted[task]
    if num_slots >= len(wanted):
        assert all(share or not wanted[task] for task, share in shares.items())
    for poor in wanted:
        for rich in wanted:
            if shares[poor] < wanted[poor] and shares[rich] > 1:  # a slot less for one of them is not fairer
                assert (shares[poor] + 1) / weight_of[poor] >= (shares[rich] / weight_of[rich]) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("wanted", "weight_of", "num_slots", "shares"),
    [
        ({"a": 9, "b": 9}, {"a": 1.0, "b": 1.0}, 8, {"a": 4, "b": 4}),
        ({"a": 9, "b": 9}, {"a": 3.0, "b": 1.0}, 8, {"a": 6, "b": 2}),
        ({"a": 9, "b": 1}, {"a": 1.0, "b": 1.0}, 8, {"a": 7, "b": 1}),
        ({"a": 9, "b": 9, "c": 9}, {"a": 1.0, "b": 1.0, "c": 2.0}, 2, {"a": 1, "b": 0, "c": 1}),
        ({"a": 2, "b": 0}, {"a": 1.0, "b": 9.0}, 8, {"a": 2, "b": 0}),
    ],
)
def test_slots_by_weight(
    wanted: dict[str, int], weight_of: dict[str, float], num_slots: int, shares: dict[str, int]
) -> None:
    assert slot_shares(wanted, weight_of, num_slots) == shares


def step(shares: TokenShares, costs: dict[str, int], weight_of: dict[str, float]) -> tuple[str, ...]:
    """Take one step at the expected cost; return the tasks that train in it."""
    chosen = shares.choose(costs, weight_of)
    shares.trained({task: cost if task in chosen else 0 for task, cost in costs.items()}, weight_of)
    return chosen


@given(st.dictionaries(names, st.tuples(st.integers(1, 5000), weights), min_size=1))
def test_tokens_come_to_be_in_proportion_to_weights(tasks: dict[str, tuple[int, float]]) -> None:
    """Whatever steps cost, no task is ever ahead of another by more than two of the largest steps."""
    costs = {task: cost for task, (cost, _) in tasks.items()}
    weight_of = {task: weight for task, (_, weight) in tasks.items()}
    shares, trained = TokenShares(), dict.fromkeys(costs, 0)
    largest = max(cost / weight_of[task] for task, cost in costs.items())
    for _ in range(200):
        chosen = step(shares, costs, weight_of)
        assert chosen
        assert list(chosen) == [task for task in costs if task in chosen]
        for task in chosen:
            trained[task] += costs[task]
        clocks = [trained[task] / weight_of[task] for task in costs]
        assert max(clocks) - min(clocks) <= 2 * largest * (1 + 1e-9)
    for task, received in shares.received.items():
        assert received.tokens == trained[task]
        assert received.all_tokens == sum(trained.values())
        assert received.due_tokens == pytest.approx(received.all_tokens * weight_of[task] / sum(weight_of.values()))


def test_rows_of_20_times_the_length_starve_no_task() -> None:
    shares, costs = TokenShares(), {"short": 50, "long": 1000, "middle": 300}
    weight_of = dict.fromkeys(costs, 1.0)
    steps = [step(shares, costs, weight_of) for _ in range(1000)]
    assert jain_index({task: received.tokens for task, received in shares.received.items()}) > 0.99
    assert sum("short" in chosen for chosen in steps) == 1000


def test_who_comes_late_is_owed_nothing_and_owes_nothing() -> None:
    shares, weight_of = TokenShares(), {"a": 1.0, "b": 1.0}
    for _ in range(10):
        step(shares, {"a": 100}, weight_of)
    for _ in range(10):
        assert step(shares, {"a": 100, "b": 100}, weight_of) == ("a", "b")
    step(shares, {"a": 100}, weight_of)
    assert step(shares, {"a": 100, "b": 100}, weight_of) == ("a", "b")


def test_a_task_that_the_other_only_catches_up_with_waits_for_it() -> None:
    shares, costs, weight_of = TokenShares(), {"a": 100, "b": 100}, {"a": 1.0, "b": 1.0}
    shares.choose(costs, weight_of)
    shares.trained({"a": 100, "b": 0}, weight_of)
    assert step(shares, costs, weight_of) == ("b",), "its step brings b level with a"
    assert step(shares, costs, weight_of) == ("a", "b")


def test_the_same_arrivals_give_the_same_steps() -> None:
    def steps() -> list[tuple[str, ...]]:
        shares, weight_of = TokenShares(), {"a": 1.0, "b": 2.0, "c": 1.0}
        costs = [{"a": 30, "b": 70}, {"a": 30, "b": 70, "c": 500}, {"b": 70, "c": 500}]
        return [step(shares, costs[index // 20], weight_of) for index in range(60)]

    assert steps() == steps()


@pytest.mark.parametrize(("shares", "index"), [([1, 1, 1], 1.0), ([1, 0, 0, 0], 0.25), ([2, 1], 0.9), ([0, 0], 1.0)])
def test_jains_index(shares: list[float], index: float) -> None:
    assert jain_index(dict(enumerate(shares))) == pytest.approx(index)


def test_a_step_that_fails_costs_nothing_and_tokens_count_as_they_were_trained() -> None:
    shares, costs, weight_of = TokenShares(), {"a": 100, "b": 100, "c": 100}, {"a": 1.0, "b": 1.0, "c": 2.0}
    assert shares.choose(costs, weight_of) == ("a", "b", "c")
    assert shares.choose(costs, weight_of) == ("a", "b", "c"), "nobody has trained"
    shares.trained({"a": 130, "b": 0, "c": 90}, weight_of)
    assert shares.clocks == {"a": 130, "b": 0, "c": 45}
    assert [(shares.received[task].tokens, shares.received[task].due_tokens) for task in costs] == [
        (130, 55),
        (0, 55),
        (90, 110),
    ]
    shares.forget("a")
    assert shares.choose(costs, weight_of) == ("a", "b", "c"), "another task of that name owes nothing"


def test_only_steps_with_others_count_and_a_task_that_leaves_is_forgotten() -> None:
    shares, weight_of = TokenShares(), {"a": 1.0, "b": 3.0}
    step(shares, {"a": 100}, weight_of)
    assert not shares.received
    step(shares, {"a": 100, "b": 100}, weight_of)
    assert (shares.received["a"].num_steps, shares.received["a"].all_tokens) == (1, 200)
    assert shares.received["a"].due_tokens == pytest.approx(50)
    shares.forget("a")
    assert list(shares.received) == ["b"]


@pytest.mark.parametrize(
    ("owners", "weight_of"),
    [
        ({"a": ("", 0)}, {"a": 1.0}),
        ({"a": ("", 0), "b": ("", 0)}, {"a": 0.5, "b": 0.5}),
        ({"a": ("x", 0), "b": ("y", 0), "c": ("y", 0)}, {"a": 1.0, "b": 0.5, "c": 0.5}),
        ({"a": ("x", 1), "b": ("x", 0), "c": ("y", -7)}, {"a": 2 / 3, "b": 1 / 3, "c": 1.0}),
        ({"a": ("x", 7), "b": ("x", 4)}, {"a": 8 / 9, "b": 1 / 9}),
    ],
)
def test_tenants_weigh_the_same_and_a_priority_more_is_twice_the_weight(
    owners: dict[str, tuple[str, int]], weight_of: dict[str, float]
) -> None:
    assert task_weights(owners) == pytest.approx(weight_of)


@pytest.mark.parametrize("lower", [-20, -21, -(10**9)])
def test_a_difference_of_priorities_counts_up_to_20(lower: int) -> None:
    assert task_weights({"a": ("x", 0), "b": ("x", lower)})["b"] == pytest.approx(1 / (2**20 + 1), rel=1e-12)


@given(st.dictionaries(names, st.tuples(st.sampled_from(["", "x"]), st.integers(-(10**9), 10**9)), min_size=1))
def test_weights_are_positive_whatever_the_priorities(owners: dict[str, tuple[str, int]]) -> None:
    weight_of = task_weights(owners)
    assert all(weight > 0 for weight in weight_of.values())
    assert sum(weight_of.values()) == pytest.approx(len({tenant for tenant, _ in owners.values()}))
