"""Copies within a population, and the jobs that end within a budget."""

from __future__ import annotations

import pytest

from alto.search import Need, beyond_budget, forks_of, population_rungs

CONFIG = {"learning_rate": 1e-3, "weight_decay": 0.1, "lora_dropout": 0.0}


def forks(kept: list[str], dropped: list[str], *, rung: int = 0, seed: int = 1, bounds: dict | None = None) -> list:
    configs = dict.fromkeys(kept, CONFIG)
    return forks_of(kept, dropped, configs, bounds or {}, exchanged=0.25, seed=seed, rung=rung)


def test_each_that_ended_is_replaced_by_a_copy_of_one_of_the_best() -> None:
    found = forks(["a", "b", "c", "d", "e", "f"], ["g", "h"])
    assert [fork.replaces for fork in found] == ["g", "h"]
    assert {fork.origin for fork in found} <= {"a", "b"}, "the best quarter of eight"
    drawn = {fork.origin for seed in range(20) for fork in forks(["a", "b", "c", "d", "e", "f"], ["g", "h"], seed=seed)}
    assert drawn == {"a", "b"}
    drawn = {fork.origin for seed in range(30) for fork in forks(list("abcdefg"), ["h", "i"], seed=seed)}
    assert drawn == {"a", "b", "c"}, "the best quarter of nine, rounded up"


def test_settings_are_those_of_the_origin_changed() -> None:
    configs = {"a": CONFIG, "b": {**CONFIG, "learning_rate": 1e-5}}
    for seed in range(20):
        (fork,) = forks_of(["a", "b"], ["c"], configs, {}, exchanged=0.5, seed=seed, rung=0)
        factor = fork.changes["learning_rate"] / configs[fork.origin]["learning_rate"]
        assert factor == pytest.approx(0.8) or factor == pytest.approx(1.25)


def test_jobs_that_ended_at_one_rung_are_replaced_by_different_copies() -> None:
    drawn = [forks(["a"], ["b", "c"], rung=rung) for rung in range(10)]
    assert any(one.changes != other.changes for one, other in drawn)


def test_settings_move_by_a_factor_inside_their_bounds() -> None:
    rates = {fork.changes["learning_rate"] for seed in range(30) for fork in forks(["a"], ["b"], seed=seed)}
    assert sorted(rates) == pytest.approx([0.8e-3, 1.25e-3])
    dropouts = {fork.changes["lora_dropout"] for seed in range(30) for fork in forks(["a"], ["b"], seed=seed)}
    assert dropouts == {0.0, 0.05}
    zero = {"a": {**CONFIG, "weight_decay": 0.0}}
    drawn = [forks_of(["a"], ["b"], zero, {}, exchanged=0.25, seed=seed, rung=0)[0].changes for seed in range(30)]
    decays = {changes["weight_decay"] for changes in drawn}
    assert decays == {0.0, 0.01}
    high = {"a": {"learning_rate": 0.9, "weight_decay": 0.9, "lora_dropout": 0.85}}
    drawn = [forks_of(["a"], ["b"], high, {}, exchanged=0.25, seed=seed, rung=0)[0].changes for seed in range(30)]
    assert {key: max(changes[key] for changes in drawn) for key in CONFIG} == {
        "learning_rate": 1.0,
        "weight_decay": 1.0,
        "lora_dropout": 0.9,
    }
    narrow = {"learning_rate": (9e-4, 1.1e-3)}
    rates = {fork.changes["learning_rate"] for s in range(30) for fork in forks(["a"], ["b"], seed=s, bounds=narrow)}
    assert rates == {9e-4, 1.1e-3}


def test_the_same_rung_gives_the_same_forks() -> None:
    assert forks(["a", "b"], ["c"]) == forks(["a", "b"], ["c"])
    assert any(forks(["a", "b"], ["c"]) != forks(["a", "b"], ["c"], rung=rung) for rung in range(1, 6))


def test_without_a_job_that_trains_nothing_is_copied() -> None:
    assert forks([], ["a"]) == []


@pytest.mark.parametrize(
    ("interval", "expected"), [(0.1, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)), (0.5, (0.5,)), (0.4, (0.4, 0.8))]
)
def test_points_of_exchange(interval: float, expected: tuple[float, ...]) -> None:
    assert population_rungs(interval) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("needs", "ended"),
    [
        ({}, ()),
        ({"a": 0.5, "b": 0.5}, ()),
        ({"a": 0.96, "b": 0.2}, ("b",)),  # the leader needs all that is left
        ({"a": 1.2, "b": 0.5, "c": 1.1}, ("a", "c")),  # can no longer be finished
        ({"a": 1.2, "b": 0.96, "c": 0.5}, ("a", "c")),
        ({"a": 1.2, "b": 1.1}, ("b",)),  # none can be finished: the best of them trains on
    ],
)
def test_jobs_end_for_the_leader(needs: dict[str, float], ended: tuple[str, ...]) -> None:
    margins = {job: Need(share=share, reserved=share + 0.05) for job, share in needs.items()}
    assert beyond_budget(tuple(needs), margins) == ended
