"""Who sits where: laws that hold for any jobs and slots, and the order of preference as a table."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.scheduler import JobDemand, plan_residents


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[JobDemand], int]:
    """Jobs of a task midway: some seated, some of all waiting at a rung."""
    num_slots = draw(st.integers(1, 6))
    count = draw(st.integers(0, 14))
    seats: list[int | None] = list(draw(st.permutations([*range(num_slots), *[None] * count])))
    demands = [
        JobDemand(
            job=f"job-{index:03d}",
            batch_size=draw(st.sampled_from([1, 2, 4, 8])),
            slot=seats[index],
            is_waiting=draw(st.booleans()),
            has_started=draw(st.booleans()),
        )
        for index in range(count)
    ]
    return demands, num_slots


def seated_after(demands: list[JobDemand], num_slots: int) -> dict[str, int]:
    plan = plan_residents(demands, num_slots)
    seats = {demand.job: demand.slot for demand in demands if demand.slot is not None}
    for job in plan.park:
        del seats[job]
    return seats | dict(plan.seat)


@given(situations())
def test_a_slot_holds_one_job_and_a_job_one_slot(situation: tuple[list[JobDemand], int]) -> None:
    demands, num_slots = situation
    plan = plan_residents(demands, num_slots)
    seats = seated_after(demands, num_slots)
    assert len(set(seats.values())) == len(seats)
    assert set(seats.values()) <= set(range(num_slots))
    assert len(set(plan.park)) == len(plan.park)
    assert {job for job, _ in plan.seat}.isdisjoint(demand.job for demand in demands if demand.slot is not None)


@given(situations())
def test_residents_that_can_train_stay_where_they_are(situation: tuple[list[JobDemand], int]) -> None:
    demands, num_slots = situation
    seats = seated_after(demands, num_slots)
    for demand in demands:
        if demand.slot is not None and not demand.is_waiting:
            assert seats[demand.job] == demand.slot


@given(situations())
def test_no_slot_is_without_a_job_that_trains_while_one_could(situation: tuple[list[JobDemand], int]) -> None:
    demands, num_slots = situation
    seats = seated_after(demands, num_slots)
    can_train = [demand.job for demand in demands if not demand.is_waiting]
    assert sum(job in seats for job in can_train) == min(num_slots, len(can_train))


@given(situations())
def test_only_waiting_jobs_are_parked_and_only_for_a_slot_that_is_wanted(
    situation: tuple[list[JobDemand], int],
) -> None:
    demands, num_slots = situation
    plan = plan_residents(demands, num_slots)
    by_id = {demand.job: demand for demand in demands}
    assert all(by_id[job].is_waiting and by_id[job].slot is not None for job in plan.park)
    assert not any(by_id[job].is_waiting for job, _ in plan.seat)
    num_free = num_slots - sum(demand.slot is not None for demand in demands)
    assert len(plan.park) == max(0, len(plan.seat) - num_free)


@given(situations(), st.randoms(use_true_random=False))
def test_the_order_of_the_demands_does_not_matter(situation: tuple[list[JobDemand], int], random: object) -> None:
    demands, num_slots = situation
    shuffled = list(demands)
    random.shuffle(shuffled)
    assert plan_residents(shuffled, num_slots) == plan_residents(demands, num_slots)


@given(situations())
def test_planning_again_changes_nothing(situation: tuple[list[JobDemand], int]) -> None:
    demands, num_slots = situation
    seats = seated_after(demands, num_slots)
    settled = [
        JobDemand(
            job=demand.job, batch_size=demand.batch_size, slot=seats.get(demand.job), is_waiting=demand.is_waiting
        )
        for demand in demands
    ]
    again = plan_residents(settled, num_slots)
    assert again.park == again.seat == ()


@given(situations())
def test_the_usual_batch_size_is_chosen_while_somebody_has_it(situation: tuple[list[JobDemand], int]) -> None:
    demands, num_slots = situation
    by_id = {demand.job: demand for demand in demands}
    sizes = Counter(demand.batch_size for demand in demands if demand.slot is not None and not demand.is_waiting)
    unseated = {demand.job for demand in demands if demand.slot is None and not demand.is_waiting}
    for job, _ in plan_residents(demands, num_slots).seat:
        most = max(sizes.values(), default=0)
        usual = max((size for size, count in sizes.items() if count == most), default=None)
        available = {by_id[other].batch_size for other in unseated}
        expected = usual if usual in available else max(available)
        assert by_id[job].batch_size == expected
        sizes[expected] += 1
        unseated.remove(job)


def job(name: str, batch_size: int, **state: object) -> JobDemand:
    return JobDemand(job=name, batch_size=batch_size, **state)


@pytest.mark.parametrize(
    ("demands", "num_slots", "park", "seat"),
    [
        ([], 3, (), ()),
        ([job("a", 1), job("b", 8), job("c", 4)], 2, (), (("b", 0), ("c", 1))),
        ([job("a", 1), job("b", 8), job("c", 8), job("d", 4)], 3, (), (("b", 0), ("c", 1), ("d", 2))),
        ([job("a", 2, slot=1), job("b", 8), job("c", 2)], 3, (), (("c", 0), ("b", 2))),
        ([job("a", 2), job("b", 2, has_started=True)], 1, (), (("b", 0),)),
        ([job("b", 2), job("a", 2)], 1, (), (("a", 0),)),
        ([job("a", 2, slot=0, is_waiting=True), job("b", 2)], 2, (), (("b", 1),)),
        (
            [job("b", 2, slot=0, is_waiting=True), job("a", 2, slot=1, is_waiting=True), job("c", 2)],
            2,
            ("a",),
            (("c", 1),),
        ),
        ([job("a", 2, slot=0, is_waiting=True), job("b", 2, is_waiting=True)], 1, (), ()),
        ([job("a", 2, slot=0), job("b", 8)], 1, (), ()),
    ],
)
def test_preferences(
    demands: list[JobDemand], num_slots: int, park: tuple[str, ...], seat: tuple[tuple[str, int], ...]
) -> None:
    plan = plan_residents(demands, num_slots)
    assert (plan.park, plan.seat) == (park, seat)
