"""``search`` of a task: how many configurations are tried, what may be spent on them, and what is refused."""

from __future__ import annotations

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
    ("search", "changes", "said"),
    [
        ({"budget": {"cost": 1}}, {}, "search.budget.* expected both cost and gpu_hour_price, found only cost"),
        ({"budget": {"gpu_hour_price": 1}}, {}, "search.budget.* found only gpu_hour_price"),
        ({"budget": {"jobs": 3}}, {}, "search.budget.jobs: expected it with another algorithm than 'grid'"),
        ({"algorithm": "grid", "num_initial_jobs": 3}, {}, "search.num_initial_jobs: .* found 'grid'"),
        ({"algorithm": "random", "num_initial_jobs": 3}, {}, "search.num_initial_jobs: .* found 'random'"),
        ("grid", {"space": RANGE}, "search_space.learning_rate should have 'num'"),
        ("tpe", {"space": {"r": [4]}}, "search.algorithm 'tpe' should have several configurations .* found 1"),
        ("pbt", {"early_exit": False}, "search.algorithm 'pbt' should rank its population"),
        ("pbt", {"early_exit": {"select": False}}, "search.algorithm 'pbt' should rank its population"),
        ("bayes", {}, "search.algorithm .* 'bayes'"),
        (3, {}, r"search should be a mapping of settings, found 3. Write for example \{algorithm: tpe\}"),
    ],
)
def test_what_is_refused(search: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        task(search, **changes)
