"""The model of time and memory of tasks that share an executor, against a simulation in small steps and by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharing_problems import sharing_of

from alto.scheduler.inter_task.colocation import (
    Member,
    alone_rates,
    finish_times_s,
    fits,
    member_of,
    members_ending_at,
)

seconds = st.floats(0.01, 1e5)
shares = st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1))
any_members = st.lists(st.builds(lambda s, share: member_of(s, share * s), seconds, shares), min_size=1, max_size=8)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_equal_tasks_pay_their_steps_once(count: int) -> None:
    assert finish_times_s([member_of(10.0, 4.0)] * count) == pytest.approx([count * 6.0 + 4.0] * count)


def test_two_tasks_by_hand() -> None:
    # Both are active until the short one has done its own 2 s: 2 * (1 + 1 + 1) s, for it steps as often as it works.
    # The other has 4 s of own work left then, and a second of steps for each four of them.
    assert finish_times_s([member_of(4.0, 2.0), member_of(7.5, 1.5)]) == pytest.approx([6.0, 6.0 + 4.0 * 1.25])


@given(any_members)
def test_the_ends_are_those_of_many_small_steps(members: list[Member]) -> None:
    members = [Member(own_s=max(member.own_s, 0.01), step_s=member.step_s) for member in members]
    found = finish_times_s(members)
    left = dict(enumerate(members))
    now_s, ends_s = 0.0, {}
    while left:
        pace = 1 / (len(left) + max(member.step_s / member.own_s for member in left.values()))
        passed_s = min(member.own_s / pace for member in left.values())
        now_s += passed_s
        for index, member in list(left.items()):
            done = passed_s * pace / member.own_s
            if done >= 1 - 1e-9:
                ends_s[index] = now_s
                del left[index]
            else:
                left[index] = Member(own_s=member.own_s * (1 - done), step_s=member.step_s * (1 - done))
    assert found == pytest.approx([ends_s[index] for index in range(len(members))], rel=1e-6)


@given(any_members)
def test_no_task_is_faster_than_alone_and_all_are_between_their_sum_and_their_own_work(members: list[Member]) -> None:
    ends_s = finish_times_s(members)
    rounding = 1 + 1e-9
    for member, end_s in zip(members, ends_s, strict=True):
        assert end_s * rounding >= member.own_s + member.step_s
    own_s = sum(member.own_s for member in members)
    assert max(ends_s) * rounding >= own_s + max(member.step_s for member in members)
    assert max(ends_s) <= (own_s + sum(member.step_s for member in members)) * rounding


@given(st.lists(st.tuples(seconds, st.floats(0, 0.99)), min_size=1, max_size=8))
def test_members_are_found_again_from_their_ends(tasks: list[tuple[float, float]]) -> None:
    members = [member_of(duration_s, share * duration_s) for duration_s, share in tasks]
    found = members_ending_at(finish_times_s(members), [share for _, share in tasks])
    longest = max(duration_s for duration_s, _ in tasks)
    for before, after in zip(members, found, strict=True):
        assert (after.own_s, after.step_s) == pytest.approx((before.own_s, before.step_s), rel=1e-6, abs=1e-6 * longest)


@given(any_members)
def test_rates_are_those_until_the_first_end(members: list[Member]) -> None:
    rates = alone_rates(members)
    first_s, index = min((end_s, index) for index, end_s in enumerate(finish_times_s(members)))
    assert rates[index] * first_s == pytest.approx(members[index].own_s + members[index].step_s)
    assert alone_rates(members[:1]) == [1.0]


def test_a_task_of_steps_alone_and_one_without_any_work_have_an_end() -> None:
    assert finish_times_s([member_of(10.0, 10.0)]) == pytest.approx([10.0])
    assert finish_times_s([member_of(0.0, 0.0), member_of(2.0, 1.0)]) == [0.0, 2.0]
    assert members_ending_at([0.0, 3.0], [0.5, 0.5])[0] == Member(own_s=0.0, step_s=0.0)
    assert alone_rates([]) == []


def test_who_fits_is_counted_with_the_largest_slot_and_the_largest_pass() -> None:
    small = sharing_of(0.0, num_slots=3, capacity_bytes=20)
    large = sharing_of(0.0, num_slots=2, capacity_bytes=30)
    assert fits([small, large])  # 10 + 5 slots of 1
    for slot_bytes, is_enough in ((2, True), (3, False)):
        slots = [type(small)(**{**_fields(large), "slot_bytes": slot_bytes}), small]
        assert all(fits(order) == is_enough for order in itertools.permutations(slots))
    wide = type(small)(**{**_fields(large), "pass_bytes": 16})
    assert not fits([wide, small])


def _fields(sharing: object) -> dict[str, object]:
    return {name: getattr(sharing, name) for name in sharing.__slots__}  # type: ignore[attr-defined]
