"""The order of tasks on one device."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.errors import SpecError, UnsupportedError
from alto.scheduler import TaskDemand, schedule_tasks


def demands_of(*samples: int) -> list[TaskDemand]:
    return [TaskDemand(task=f"t{index}", num_gpus=1, num_samples=count) for index, count in enumerate(samples)]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("fifo", [0, 1, 2, 3]),
        ("sjf", [1, 3, 0, 2]),
        ("lpt", [2, 0, 1, 3]),
        ("cp-sat", [1, 3, 0, 2]),
        ("MILP", [1, 3, 0, 2]),
        ("milp", [1, 3, 0, 2]),
    ],
)
def test_orders_are_stable(method: str, expected: list[int]) -> None:
    schedule = schedule_tasks(demands_of(30, 10, 40, 10), method=method, total_gpus=1)
    assert schedule.method == method.lower()
    assert [placement.task_index for placement in schedule.placements] == expected
    assert [placement.task for placement in schedule.placements] == [f"t{index}" for index in expected]
    assert [placement.num_samples for placement in schedule.placements] == [[30, 10, 40, 10][i] for i in expected]
    assert [placement.order for placement in schedule.placements] == [0, 1, 2, 3]
    assert {placement.gpus for placement in schedule.placements} == {(0,)}


@given(st.lists(st.integers(0, 50), max_size=6), st.sampled_from(["cp-sat", "MILP"]))
def test_an_optimal_schedule_has_the_least_sum_of_completion_times(samples: list[int], method: str) -> None:
    placements = schedule_tasks(demands_of(*samples), method=method, total_gpus=1).placements
    found = sum(itertools.accumulate(placement.num_samples for placement in placements))
    assert found == min(sum(itertools.accumulate(order)) for order in itertools.permutations(samples))


def test_equal_names_are_told_apart_by_index() -> None:
    demands = [TaskDemand(task="same", num_gpus=1, num_samples=count) for count in (2, 1)]
    schedule = schedule_tasks(demands, method="sjf", total_gpus=1)
    assert [placement.task_index for placement in schedule.placements] == [1, 0]


def test_unknown_method_names_the_known_ones() -> None:
    with pytest.raises(SpecError, match=r"expected one of fifo, sjf, lpt, cp-sat, milp, found 'magic'"):
        schedule_tasks(demands_of(1), method="magic", total_gpus=1)


@pytest.mark.parametrize(("num_gpus", "total_gpus"), [(2, 1), (1, 2), (2, 2)])
def test_more_than_one_device_is_refused(num_gpus: int, total_gpus: int) -> None:
    demand = TaskDemand(task="wide", num_gpus=num_gpus, num_samples=1)
    with pytest.raises(UnsupportedError, match=rf"'wide': .* found {num_gpus} and {total_gpus}; set both to 1"):
        schedule_tasks([demand], method="fifo", total_gpus=total_gpus)
