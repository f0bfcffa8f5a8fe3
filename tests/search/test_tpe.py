"""Suggestions of Optuna's estimator: pure, inside the space, never repeated, and better than chance."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.search import Trial, next_configuration
from alto.spec.search_space import SearchSpace

pytest.importorskip("optuna", reason="needs the search extra: pip install -e '.[search]'")

SPACE = SearchSpace.parse(
    {
        "lr": {"min": 1e-5, "max": 1e-1, "log": True},
        "r": [4, 8, 16, 32],
        "paired": {"per_device_train_batch_size": [1, 4], "weight_decay": [0.0, 0.1]},
        "target_modules": ["all-linear", ["q_proj", "v_proj"]],
    }
)


def loss_of(values: dict[str, Any]) -> float:
    """Return a loss that is lowest at a learning rate of 1e-3 and a rank of 16."""
    return (math.log10(values["learning_rate"]) + 3) ** 2 + (math.log2(values["r"]) - 4) ** 2 / 4


def searched(count: int, seed: int) -> list[float]:
    trials: list[Trial] = []
    for values in SPACE.sample(10, seed):
        trials.append(Trial(values=values, losses=(loss_of(values),), has_ended=True))
    while len(trials) < count:
        values = next_configuration(SPACE, trials, seed)
        assert values is not None
        trials.append(Trial(values=values, losses=(loss_of(values),), has_ended=True))
    return [trial.losses[0] for trial in trials]


def test_it_finds_what_random_draws_do_not() -> None:
    for seed in (1, 2, 3):
        learned = searched(40, seed)[10:]
        drawn = [loss_of(values) for values in SPACE.sample(40, seed)[10:]]
        assert sum(loss < 0.5 for loss in learned) > 2 * sum(loss < 0.5 for loss in drawn)


def test_the_same_trials_give_the_same_suggestion() -> None:
    trials = [Trial(values=values, losses=(loss_of(values),), has_ended=True) for values in SPACE.sample(12, 1)]
    assert next_configuration(SPACE, trials, 1) == next_configuration(SPACE, trials, 1)
    assert next_configuration(SPACE, trials, 1) != next_configuration(SPACE, trials, 2)
    assert next_configuration(SPACE, trials, 1) != next_configuration(SPACE, trials[:-1], 1)


@given(st.integers(0, 2**32 - 1), st.integers(2, 30), st.randoms(use_true_random=False))
def test_suggestions_are_in_the_space(seed: int, count: int, source: random.Random) -> None:
    trials = []
    for values in SPACE.sample(count, seed):
        losses = tuple(source.random() for _ in range(source.randrange(4)))
        final = source.choice([None, source.random()])
        trials.append(Trial(values=values, losses=losses, final=final, has_ended=final is not None))
    values = next_configuration(SPACE, trials, seed)
    assert values is not None
    assert set(values) == set(SPACE.keys)
    assert 1e-5 <= values["learning_rate"] <= 1e-1
    assert values["r"] in (4, 8, 16, 32)
    assert (values["per_device_train_batch_size"], values["weight_decay"]) in ((1, 0.0), (4, 0.1))
    assert values["target_modules"] in ("all-linear", ("q_proj", "v_proj"))


def test_a_space_that_is_searched_gives_no_more() -> None:
    space = SearchSpace.parse({"r": [4, 8], "lr": [1e-4, 1e-3]})
    trials = [Trial(values=values, losses=(1.0,), has_ended=True) for values in space.expand(0)]
    assert next_configuration(space, trials, 0) is None
    assert next_configuration(space, trials[:-1], 0) == dict(list(space.expand(0))[-1])


def test_configurations_that_do_not_fit_are_avoided() -> None:
    space = SearchSpace.parse({"r": [4, 8, 16, 32, 64, 128], "lr": {"min": 1e-5, "max": 1e-1, "log": True}})
    trials = [
        Trial(
            values=values,
            losses=() if values["r"] > 16 else (1.0 + 1 / values["r"],),
            has_ended=True,
            is_infeasible=values["r"] > 16,
        )
        for values in space.sample(30, 0)
    ]
    found = [next_configuration(space, trials, seed) for seed in range(20)]
    assert sum(values["r"] > 16 for values in found if values) <= 3
    told_as_good = [Trial(values=trial.values, losses=trial.losses or (0.1,), has_ended=True) for trial in trials]
    found = [next_configuration(space, told_as_good, seed) for seed in range(20)]
    assert sum(values["r"] > 16 for values in found if values) >= 10


def test_configurations_that_do_not_fit_are_avoided_however_good_they_were() -> None:
    space = SearchSpace.parse({"r": [4, 8, 16, 32, 64, 128], "lr": {"min": 1e-5, "max": 1e-1, "log": True}})
    trials = [
        Trial(values=values, losses=(1 / values["r"],), has_ended=True, is_infeasible=values["r"] > 16)
        for values in space.sample(30, 0)
    ]
    found = [next_configuration(space, trials, seed) for seed in range(20)]
    assert sum(values["r"] > 16 for values in found if values) <= 5


def test_a_lower_value_after_all_steps_is_better() -> None:
    space = SearchSpace.parse({"lr": {"min": 1e-5, "max": 1e-1, "log": True}, "r": [4, 8]})
    trials = [
        Trial(values=values, losses=(1.0,), final=-math.log10(values["learning_rate"]), has_ended=True)
        for values in space.sample(30, 0)
    ]
    found = [next_configuration(space, trials, seed) for seed in range(20)]
    assert sum(values["learning_rate"] > 1e-2 for values in found if values) >= 15


def test_what_trains_without_a_value_yet_is_kept_at_a_distance() -> None:
    space = SearchSpace.parse({"lr": {"min": 1e-5, "max": 1e-1, "log": True}, "r": [4, 8]})
    drawn = space.sample(30, 0)
    known = [Trial(values=values, losses=(1.0,), has_ended=True) for values in drawn if values["learning_rate"] < 1e-2]
    training = [Trial(values=values) for values in drawn if values["learning_rate"] >= 1e-2]
    assert len(training) >= 5

    def near(trials: list[Trial]) -> int:
        found = [next_configuration(space, trials, seed) for seed in range(20)]
        return sum(values["learning_rate"] >= 1e-2 for values in found if values)

    assert near([*known, *training]) < near(known)


@pytest.mark.parametrize("falls", [False, True])
def test_neighbours_in_a_list_of_numbers_that_rises_or_falls_are_alike(falls: bool) -> None:
    ranks = sorted(range(1, 41), reverse=falls)
    space = SearchSpace.parse({"r": ranks})
    trials = [Trial(values={"r": rank}, losses=(float(rank),), has_ended=True) for rank in ranks if rank % 2]
    found = [next_configuration(space, trials, seed) for seed in range(20)]
    assert sum(values["r"] <= 10 for values in found if values) >= 15


def test_sampled_values_of_a_pairing_are_those_of_the_seed() -> None:
    space = SearchSpace.parse(
        {"paired": {"lr": {"min": 1e-5, "max": 1e-1, "num": 6}, "weight_decay": [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]}}
    )
    rows = list(space.expand(5))
    trials = [Trial(values=values, losses=(1.0,), has_ended=True) for values in rows[:3]]
    assert next_configuration(space, trials, 5) in rows[3:]


def test_the_last_configuration_of_a_space_is_found() -> None:
    space = SearchSpace.parse({"r": list(range(1, 31))})
    for seed in range(3):
        *begun, left = space.sample(30, seed)
        trials = [Trial(values=values, losses=(float(values["r"]),), has_ended=True) for values in begun]
        assert next_configuration(space, trials, seed) == left


def test_trials_that_came_further_count_as_better() -> None:
    """All losses are equal; only the numbers of evaluations differ."""
    space = SearchSpace.parse({"lr": {"min": 1e-5, "max": 1e-1, "log": True}, "r": [4, 8]})
    trials = [
        Trial(values=values, losses=(1.0,) * (4 if values["learning_rate"] > 1e-2 else 1), has_ended=True)
        for values in space.sample(30, 0)
    ]
    found = [next_configuration(space, trials, seed) for seed in range(20)]
    assert sum(values["learning_rate"] > 3e-3 for values in found if values) >= 15
