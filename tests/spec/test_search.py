"""``search`` of a task: the number of configurations, the budget, and refusals."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest

from alto.errors import SpecError
from alto.spec import Task
from alto.spec.search import Budget

GRID = {"lr": [1e-5, 1e-4, 1e-3], "r": [4, 8, 16]}
RANGE = {"lr": {"min": 1e-5, "max": 1e-2, "log": True}, "r": [4, 8]}


def task(search: Any, space: Any = GRID, **changes: Any) -> Task:
    return Task(model="alto-tiny", dataset="rows.jsonl", search=search, search_space=space, **changes)


@pytest.mark.parametrize(
    ("search", "space", "num_initial", "most"),
    [
        ("grid", GRID, 9, 9),
        ({"algorithm": "grid", "budget": {"duration_s": 60}}, GRID, 9, 9),
        ("random", GRID, 5, 5),  # half of them, rounded up
        ("random", RANGE, 8, 8),  # a range counts as 8 values
        ({"algorithm": "random", "budget": {"jobs": 7}}, GRID, 7, 7),
        ({"algorithm": "random", "budget": {"jobs": 100}}, GRID, 9, 9),
        ({"algorithm": "random", "budget": {"duration_s": 60}}, GRID, 5, 5),
        ("tpe", GRID, 2, 5),
        ("tpe", RANGE, 4, 8),
        ({"algorithm": "tpe", "budget": {"jobs": 30}}, RANGE, 10, 30),
        ({"algorithm": "tpe", "budget": {"jobs": 3}, "num_initial_jobs": 5}, RANGE, 3, 3),
        ({"algorithm": "tpe", "budget": {"samples": 100}}, RANGE, 10, 10_000),
        ({"algorithm": "tpe", "budget": {"duration_s": 60}}, GRID, 4, 9),
        ({"algorithm": "tpe", "budget": {"cost": 1, "gpu_hour_price": 2}}, GRID, 4, 9),
        ("pbt", RANGE, 12, 12),
        ("pbt", GRID, 9, 9),
        ({"algorithm": "pbt", "num_initial_jobs": 20}, GRID, 9, 9),
    ],
)
def test_how_many_begin_and_how_many_are_tried(search: Any, space: Any, num_initial: int, most: int) -> None:
    found = task(search, space)
    assert (len(found.jobs), found.search.max_jobs(found.search_space)) == (num_initial, most)


def test_the_first_of_several_limits_of_time_counts() -> None:
    both = {"cost": 10, "gpu_hour_price": 2.5}
    assert Budget().max_duration_s(1) is None
    assert Budget(duration_s=60, **both).max_duration_s(1) == 60
    assert Budget(duration_s=10**6, **both).max_duration_s(2) == pytest.approx(2 * 3600)


def test_random_configurations_depend_on_the_seed_of_the_data() -> None:
    def drawn(seed: int) -> list[Any]:
        return [job.values for job in task("random", RANGE, data_seed=seed).jobs]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


@pytest.mark.parametrize(
    ("search", "changes", "message"),
    [
        ({"budget": {"cost": 1}}, {}, "search.budget.* expected both cost and gpu_hour_price, found only cost"),
        ({"budget": {"gpu_hour_price": 1}}, {}, "search.budget.* found only gpu_hour_price"),
        ({"budget": {"jobs": 3}}, {}, "search.budget.jobs: expected an algorithm other than grid"),
        ({"algorithm": "grid", "num_initial_jobs": 3}, {}, "search.num_initial_jobs: .* found 'grid'"),
        ({"algorithm": "random", "num_initial_jobs": 3}, {}, "search.num_initial_jobs: .* found 'random'"),
        ({"algorithm": "random", "usual_learning_rate": 3e-4}, {}, "search.usual_learning_rate: .* found 'random'"),
        ({"algorithm": "tpe", "usual_learning_rate": 0}, {}, "search.usual_learning_rate"),
        ("grid", {"space": RANGE}, "search_space.learning_rate should have 'num'"),
        ("tpe", {"space": {"r": [4]}}, "search.algorithm 'tpe' should have several configurations .* found 1"),
        ("pbt", {"early_exit": False}, "search.algorithm 'pbt' should rank its population"),
        ("pbt", {"early_exit": {"select": False}}, "search.algorithm 'pbt' should rank its population"),
        ("bayes", {}, "search.algorithm .* 'bayes'"),
        (3, {}, r"search should be a mapping of settings, found 3. For example: \{algorithm: tpe\}"),
    ],
)
def test_what_is_refused(search: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        task(search, **changes)


WIDE = {"lr": {"min": 1e-7, "max": 1e-1, "log": True}, "r": [4, 8, 16]}


class TestNearTheUsualRate:
    def drawn(self, space: Any = WIDE, *, rate: float | None = 3e-4, seed: int = 1, num: int = 400) -> list[Any]:
        usual = {} if rate is None else {"usual_learning_rate": rate}
        search = {"algorithm": "tpe", "num_initial_jobs": num, "budget": {"jobs": num}, **usual}
        return [job.values for job in task(search, space, data_seed=seed).jobs]

    def test_three_of_four_rates_are_log_normal_around_it_and_the_others_uniform(self) -> None:
        found, uniform = self.drawn(), self.drawn(rate=None)
        assert found[3::4] == uniform[3::4]
        assert [values["r"] for values in found] == [values["r"] for values in uniform]
        distances = [math.log(values["learning_rate"] / 3e-4, 3) for values in found]
        near = [distance for number, distance in enumerate(distances, start=1) if number % 4]
        assert statistics.mean(near) == pytest.approx(0, abs=0.15)
        assert statistics.stdev(near) == pytest.approx(1, rel=0.1)
        within = sum(abs(distance) < math.log(10, 3) for distance in distances) / len(distances)
        assert 0.75 < within < 0.85, "96 % of three quarters, and a third of the others"

    @pytest.mark.parametrize("rate", [1e-5, 2e-5, 1e-3, 1e-2])
    def test_they_stay_in_the_range(self, rate: float) -> None:
        rates = [values["learning_rate"] for values in self.drawn(RANGE, rate=rate)]
        assert len(set(rates)) == 400
        assert all(1e-5 <= found <= 1e-2 for found in rates)

    def test_the_same_seed_draws_the_same(self) -> None:
        assert self.drawn(seed=2) == self.drawn(seed=2) != self.drawn(seed=3)
        assert self.drawn(num=20) == self.drawn(num=400)[:20]

    def test_a_written_task_has_the_same_jobs(self) -> None:
        found = task({"algorithm": "tpe", "usual_learning_rate": 3e-4}, WIDE)
        assert Task(**found.to_dict()).jobs == found.jobs
        assert found.jobs != task("tpe", WIDE).jobs

    @pytest.mark.parametrize(
        "rates",
        [
            {"min": 1e-6, "max": 1e-4, "log": True},  # without the usual rate
            {"min": 2e-4, "max": 5e-4, "log": True},  # near it everywhere
            {"min": 1e-5, "max": 1e-2},
        ],
    )
    def test_other_ranges_are_drawn_from_as_they_are(self, rates: Any) -> None:
        space = {"lr": rates, "r": [4, 8]}
        assert self.drawn(space, num=20) == self.drawn(space, rate=None, num=20)

    def test_lists_and_pairings_are_drawn_from_as_they_are(self) -> None:
        rates = {"min": 1e-5, "max": 1e-2, "log": True, "num": 4}
        for space in (GRID, {"paired": {"lr": rates, "r": [1, 2, 3, 4]}}):
            assert self.drawn(space, num=4) == self.drawn(space, rate=None, num=4)
