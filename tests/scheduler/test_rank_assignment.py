"""Jobs in slots of ranks: invariants for any jobs and limits, and the end of a task."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from alto.scheduler import JobDemand, RankDemand, RankSlots, ResidentLimits, ResidentPlan, assign_ranks, plan_residents

Situation = tuple[list[JobDemand], ResidentLimits]


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Draw jobs of a running task on several ranks; all resident ones are spread, or none is."""
    num_ranks, per_rank = draw(st.integers(2, 4)), draw(st.integers(1, 4))
    row_tokens = draw(st.integers(1, 30))
    limits = ResidentLimits(
        num_slots=num_ranks * per_rank,
        max_tokens=draw(st.none() | st.integers(1, 40 * row_tokens)),
        num_ranks=num_ranks,
        may_data_parallel=draw(st.booleans()),
    )
    is_data_parallel = draw(st.booleans())
    slot_of = list(draw(st.permutations(range(per_rank if is_data_parallel else limits.num_slots))))
    num_residents = draw(st.integers(0, min(len(slot_of), num_ranks - 1) if is_data_parallel else len(slot_of)))
    demands = []
    for index in range(num_residents + draw(st.integers(0, 5))):
        batch_size = draw(st.sampled_from([1, 2, 4, 8]))
        is_waiting = draw(st.booleans())
        demands.append(
            JobDemand(
                job=f"job-{index:03d}",
                batch_size=batch_size,
                num_tokens=row_tokens * batch_size,
                slot=slot_of[index] if index < num_residents else None,
                is_data_parallel=is_data_parallel and index < num_residents,
                is_waiting=is_waiting,
                may_run_ahead=is_waiting and draw(st.booleans()),
                has_started=draw(st.booleans()),
            )
        )
    return demands, limits


def slots_of(limits: ResidentLimits) -> RankSlots:
    return RankSlots(num_ranks=limits.num_ranks, per_rank=limits.num_slots // limits.num_ranks)


def carry_out(demands: Iterable[JobDemand], plan: ResidentPlan) -> list[JobDemand]:
    """Apply ``plan`` as the executor does: a job leaves its slot before another enters it."""
    after = {demand.job: demand for demand in demands}
    for parking in plan.park:
        assert after[parking.job].slot is not None
        after[parking.job] = replace(after[parking.job], slot=None, is_data_parallel=False)
    for admission in plan.admit:
        assert after[admission.job].slot is None
        after[admission.job] = replace(
            after[admission.job], slot=admission.slot, is_data_parallel=admission.is_data_parallel, has_started=True
        )
    return list(after.values())


def train(demands: Iterable[JobDemand], plan: ResidentPlan) -> list[JobDemand]:
    """Return the jobs after ``plan`` that take the next step."""
    return [d for d in demands if d.slot is not None and (not d.is_waiting or d.job in plan.ahead)]


@given(situations())
def test_a_place_of_a_bank_holds_one_job(situation: Situation) -> None:
    demands, limits = situation
    slots = slots_of(limits)
    taken: set[tuple[int, int]] = set()
    for demand in carry_out(demands, plan_residents(demands, limits)):
        if demand.slot is None:
            continue
        assert 0 <= demand.slot < limits.num_slots
        assert not demand.is_data_parallel or slots.rank_of(demand.slot) == 0
        ranks = range(limits.num_ranks) if demand.is_data_parallel else [slots.rank_of(demand.slot)]
        places = {(rank, slots.local_slot_of(demand.slot)) for rank in ranks}
        assert taken.isdisjoint(places)
        taken |= places


@given(situations())
def test_who_has_a_slot_and_who_trains_is_as_on_one_rank(situation: Situation) -> None:
    demands, limits = situation
    plan, alone = plan_residents(demands, limits), plan_residents(demands, replace(limits, num_ranks=1))
    on_ranks, on_one = carry_out(demands, plan), carry_out(demands, alone)
    assert {d.job for d in on_ranks if d.slot is not None} == {d.job for d in on_one if d.slot is not None}
    assert {d.job for d in train(on_ranks, plan)} == {d.job for d in train(on_one, alone)}
    reasons = {admission.job: admission.reason for admission in plan.admit}
    assert all(reasons[admission.job] == admission.reason for admission in alone.admit)
    assert plan.park[: len(alone.park)] == alone.park


@given(situations())
def test_a_job_that_moves_is_parked_and_seated_with_the_reason(situation: Situation) -> None:
    demands, limits = situation
    slots = slots_of(limits)
    before = {demand.job: demand for demand in demands}
    plan = plan_residents(demands, limits)
    moved = {parking.job for parking in plan.park if parking.reason == "rebalanced"}
    assert moved == {admission.job for admission in plan.admit if before[admission.job].slot is not None}
    for admission in plan.admit:
        was = before[admission.job]
        assert (admission.reason in ("balances", "data_parallel")) == (was.slot is not None)
        if was.slot is not None:
            assert admission.reason == ("data_parallel" if admission.is_data_parallel else "balances")
            assert admission.is_data_parallel != was.is_data_parallel or slots.rank_of(admission.slot) != slots.rank_of(
                was.slot
            )


@given(situations())
def test_training_jobs_are_on_their_assigned_ranks(situation: Situation) -> None:
    demands, limits = situation
    slots = slots_of(limits)
    plan = plan_residents(demands, replace(limits, may_data_parallel=False))
    before = {d.job: None if d.slot is None or d.is_data_parallel else slots.rank_of(d.slot) for d in demands}
    training = train(carry_out(demands, plan), plan)
    assigned = assign_ranks(
        (RankDemand(job=d.job, num_tokens=d.num_tokens, rank=before[d.job]) for d in training), slots
    )
    assert {d.job: slots.rank_of(d.slot) for d in training if d.slot is not None} == assigned


@given(situations())
def test_one_that_waits_moves_only_where_it_is_in_the_way(situation: Situation) -> None:
    demands, limits = situation
    slots = slots_of(limits)
    before = {demand.job: demand for demand in demands}
    plan = plan_residents(demands, limits)
    after = carry_out(demands, plan)
    for demand in after:
        was = before[demand.job]
        if demand.is_waiting and demand.job not in plan.ahead and demand.slot != was.slot and demand.slot is not None:
            assert was.slot is not None
            home = slots.rank_of(was.slot)
            on_it = [d for d in after if d.slot is not None and slots.rank_of(d.slot) == home]
            assert was.is_data_parallel or len(on_it) == slots.per_rank


@given(situations(), st.randoms(use_true_random=False))
def test_the_order_of_the_demands_does_not_matter(situation: Situation, shuffler: random.Random) -> None:
    demands, limits = situation
    shuffled = list(demands)
    shuffler.shuffle(shuffled)
    assert plan_residents(shuffled, limits) == plan_residents(demands, limits)


@given(situations())
def test_planning_again_changes_nothing(situation: Situation) -> None:
    demands, limits = situation
    plan = plan_residents(demands, limits)
    again = plan_residents(carry_out(demands, plan), limits)
    assert (again.park, again.admit, again.ahead) == ((), (), plan.ahead)


@given(situations())
def test_jobs_are_spread_where_all_train_and_are_fewer_than_the_ranks(situation: Situation) -> None:
    demands, limits = situation
    plan = plan_residents(demands, limits)
    after = carry_out(demands, plan)
    is_tail = (
        limits.may_data_parallel
        and len(train(after, plan)) == len(demands) < limits.num_ranks
        and len(demands) <= slots_of(limits).per_rank
        and any(demand.batch_size > 1 for demand in demands)
    )
    assert all(demand.is_data_parallel == (is_tail and demand.slot is not None) for demand in after)


def job(name: str, batch_size: int, **state: Any) -> JobDemand:
    """Return a job whose rows have ten tokens."""
    return JobDemand(job=name, batch_size=batch_size, num_tokens=10 * batch_size, **state)


FOUR = ResidentLimits(num_slots=8, num_ranks=4)


def moves_of(plan: ResidentPlan) -> tuple[list[tuple[str, str]], list[tuple[str, int, str, bool]]]:
    return (
        [(parking.job, parking.reason) for parking in plan.park],
        [(admission.job, admission.slot, admission.reason, admission.is_data_parallel) for admission in plan.admit],
    )


def test_fresh_jobs_are_dealt_out() -> None:
    plan = plan_residents([job("a", 4), job("b", 4), job("c", 2), job("d", 2), job("e", 4), job("f", 4)], FOUR)
    assert moves_of(plan) == (
        [],
        [("a", 0, "largest_first", False), ("b", 2, "largest_first", False), ("e", 4, "largest_first", False),
         ("f", 6, "largest_first", False), ("c", 1, "largest_first", False), ("d", 3, "largest_first", False)],
    )  # fmt: skip


def test_a_job_migrates_from_the_rank_with_most() -> None:
    sitting = [job("a", 4, slot=0), job("b", 4, slot=1), job("c", 4, slot=2), job("d", 4, slot=4)]
    assert moves_of(plan_residents(sitting, FOUR)) == ([("a", "rebalanced")], [("a", 6, "balances", False)])


def test_the_tail_is_spread_and_comes_back_when_a_job_is_added() -> None:
    two = [job("a", 4, slot=1), job("b", 1, slot=6)]
    plan = plan_residents(two, FOUR)
    assert moves_of(plan) == (
        [("a", "rebalanced"), ("b", "rebalanced")], [("a", 0, "data_parallel", True), ("b", 1, "data_parallel", True)],
    )  # fmt: skip
    spread = carry_out(two, plan)
    assert moves_of(plan_residents(spread[:1], FOUR)) == ([], [])
    four = [*spread, job("c", 2), job("d", 2)]
    added = carry_out(four, plan_residents(four, FOUR))
    assert [(d.slot, d.is_data_parallel) for d in added] == [(0, False), (6, False), (2, False), (4, False)]
    off = replace(FOUR, may_data_parallel=False)
    assert moves_of(plan_residents(spread, off)) == (
        [("a", "rebalanced"), ("b", "rebalanced")], [("a", 0, "balances", False), ("b", 2, "balances", False)],
    )  # fmt: skip


def test_a_spread_job_that_waits_leaves_the_other_ranks() -> None:
    """Others may want its place there; it keeps a slot on one rank."""
    spread = [job("a", 4, slot=0, is_data_parallel=True), job("b", 1, slot=1, is_data_parallel=True, is_waiting=True)]
    after = carry_out(spread, plan_residents(spread, FOUR))
    assert [(demand.slot, demand.is_data_parallel) for demand in after] == [(0, False), (2, False)]


def test_one_that_waits_makes_way_and_keeps_a_slot() -> None:
    two_ranks = ResidentLimits(num_slots=4, num_ranks=2)
    demands = [job("a", 8, slot=0), job("w", 4, slot=2, is_waiting=True), job("x", 4, slot=3, is_waiting=True)]
    plan = plan_residents([*demands, job("b", 8)], two_ranks)
    assert moves_of(plan) == (
        [("x", "rebalanced")], [("b", 3, "same_batch_size", False), ("x", 1, "balances", False)],
    )  # fmt: skip


def test_jobs_of_one_row_each_are_not_spread() -> None:
    assert moves_of(plan_residents([job("a", 1, slot=0), job("b", 1, slot=2)], FOUR)) == ([], [])
