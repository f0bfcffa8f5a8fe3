"""Jobs in slots: invariants for any jobs and limits, the order of preference as a table, and the end of a task."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from counting import num_calls
from hypothesis import given
from hypothesis import strategies as st

from alto.records import Throughput
from alto.scheduler import JobDemand, LastJob, ResidentLimits, ResidentPlan, forecast_last_jobs, plan_residents

Situation = tuple[list[JobDemand], ResidentLimits]


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Draw jobs of a running task: some resident, some of all waiting at a rung, some of those certain to be kept."""
    num_slots = draw(st.integers(1, 6))
    count = draw(st.integers(0, 14))
    slot_of: list[int | None] = list(draw(st.permutations([*range(num_slots), *[None] * count])))
    row_tokens = draw(st.integers(1, 30))
    demands = []
    for index in range(count):
        batch_size = draw(st.sampled_from([1, 2, 4, 8]))
        is_waiting = draw(st.booleans())
        demands.append(
            JobDemand(
                job=f"job-{index:03d}",
                batch_size=batch_size,
                num_tokens=row_tokens * batch_size,
                slot=slot_of[index],
                is_waiting=is_waiting,
                may_run_ahead=is_waiting and draw(st.booleans()),
                has_started=draw(st.booleans()),
            )
        )
    max_tokens = draw(st.none() | st.integers(1, 24 * row_tokens))
    return demands, ResidentLimits(num_slots=num_slots, max_tokens=max_tokens)


def slots_after(demands: list[JobDemand], plan: ResidentPlan) -> dict[str, int]:
    slot_of = {demand.job: demand.slot for demand in demands if demand.slot is not None}
    for parking in plan.park:
        del slot_of[parking.job]
    return slot_of | {admission.job: admission.slot for admission in plan.admit}


def train_after(demands: list[JobDemand], plan: ResidentPlan) -> list[JobDemand]:
    slot_of = slots_after(demands, plan)
    return [d for d in demands if d.job in slot_of and (not d.is_waiting or d.job in plan.ahead)]


@given(situations())
def test_a_slot_holds_one_job_and_a_job_one_slot(situation: Situation) -> None:
    demands, limits = situation
    plan = plan_residents(demands, limits)
    slot_of = slots_after(demands, plan)
    assert len(set(slot_of.values())) == len(slot_of)
    assert set(slot_of.values()) <= set(range(limits.num_slots))
    assert len({parking.job for parking in plan.park}) == len(plan.park)
    assert {s.job for s in plan.admit}.isdisjoint(demand.job for demand in demands if demand.slot is not None)
    assert plan.ahead <= slot_of.keys() & {demand.job for demand in demands if demand.may_run_ahead}


@given(situations())
def test_residents_never_have_more_tokens_than_the_limit_but_for_one_alone(situation: Situation) -> None:
    demands, limits = situation
    train = train_after(demands, plan_residents(demands, limits))
    if limits.max_tokens is not None and len(train) > 1:
        assert sum(demand.num_tokens for demand in train) <= limits.max_tokens


@given(situations())
def test_residents_that_can_train_stay_where_they_are_unless_the_limit_was_lowered(situation: Situation) -> None:
    demands, limits = situation
    slot_of = slots_after(demands, plan_residents(demands, limits))
    training = [demand for demand in demands if demand.slot is not None and not demand.is_waiting]
    if limits.max_tokens is None or sum(demand.num_tokens for demand in training) <= limits.max_tokens:
        assert all(slot_of[demand.job] == demand.slot for demand in training)


@given(situations())
def test_nothing_is_idle_while_a_job_that_could_train_fits(situation: Situation) -> None:
    demands, limits = situation
    train = train_after(demands, plan_residents(demands, limits))
    if len(train) == limits.num_slots:
        return
    num_tokens = sum(demand.num_tokens for demand in train)
    for demand in demands:
        if demand not in train and (not demand.is_waiting or demand.may_run_ahead):
            assert train, "one job alone would always fit"
            assert limits.max_tokens is not None
            assert num_tokens + demand.num_tokens > limits.max_tokens


@given(situations())
def test_only_a_job_that_others_leave_room_for_runs_ahead(situation: Situation) -> None:
    """The other jobs that train are the same with and without jobs that may run ahead."""
    demands, limits = situation
    obedient = [replace(demand, may_run_ahead=False) for demand in demands]
    train, without = (train_after(jobs, plan_residents(jobs, limits)) for jobs in (demands, obedient))
    assert [d.job for d in train if not d.is_waiting] == [d.job for d in without]


@given(situations())
def test_a_waiting_job_is_parked_only_for_a_slot_that_is_wanted(situation: Situation) -> None:
    demands, limits = situation
    plan = plan_residents(demands, limits)
    by_id = {demand.job: demand for demand in demands}
    assert all(by_id[p.job].is_waiting == (p.reason == "slot_wanted") for p in plan.park)
    num_free = limits.num_slots - sum(demand.slot is not None for demand in demands)
    assert len(plan.park) >= len(plan.admit) - num_free
    num_wanted = sum(parking.reason == "slot_wanted" for parking in plan.park)
    assert num_wanted == max(0, len(plan.admit) - num_free - (len(plan.park) - num_wanted))


@given(situations(), st.randoms(use_true_random=False))
def test_the_order_of_the_demands_does_not_matter(situation: Situation, shuffler: random.Random) -> None:
    demands, limits = situation
    shuffled = list(demands)
    shuffler.shuffle(shuffled)
    assert plan_residents(shuffled, limits) == plan_residents(demands, limits)


@given(situations())
def test_planning_again_changes_nothing(situation: Situation) -> None:
    """So the executor needs to plan only when something has changed."""
    demands, limits = situation
    plan = plan_residents(demands, limits)
    slot_of = slots_after(demands, plan)
    settled = [replace(d, slot=slot_of.get(d.job), has_started=d.has_started or d.job in slot_of) for d in demands]
    again = plan_residents(settled, limits)
    assert (again.park, again.admit, again.ahead) == ((), (), plan.ahead)


@st.composite
def shared_situations(draw: st.DrawFn) -> Situation:
    """Draw the same in a bank shared with other tasks: some slots are theirs, and the task's number of slots is
    limited."""
    demands, limits = draw(situations())
    free = sorted(set(range(limits.num_slots)) - {demand.slot for demand in demands})
    taken = frozenset(draw(st.lists(st.sampled_from(free)))) if free else frozenset()
    return demands, replace(limits, taken=taken, share=draw(st.none() | st.integers(0, limits.num_slots)))


@given(shared_situations())
def test_slots_of_other_tasks_and_those_beyond_the_share_are_left_alone(situation: Situation) -> None:
    demands, limits = situation
    plan = plan_residents(demands, limits)
    slot_of = slots_after(demands, plan)
    assert limits.taken.isdisjoint(slot_of.values())
    assert limits.share is None or len(slot_of) <= limits.share
    settled = [replace(d, slot=slot_of.get(d.job), has_started=d.has_started or d.job in slot_of) for d in demands]
    again = plan_residents(settled, limits)
    assert (again.park, again.admit, again.ahead) == ((), (), plan.ahead)


@given(shared_situations())
def test_a_smaller_share_costs_waiting_jobs_their_slots_first_and_no_more_than_needed(situation: Situation) -> None:
    demands, limits = situation
    limits = replace(limits, max_tokens=None)
    plan = plan_residents(demands, limits)
    residents = [demand for demand in demands if demand.slot is not None]
    over = {parking.job for parking in plan.park if parking.reason == "over_share"}
    share = limits.num_slots if limits.share is None else limits.share
    assert len(over) == max(0, len(residents) - share)
    waiting = {demand.job for demand in residents if demand.is_waiting}
    assert not over - waiting or waiting <= over


@given(shared_situations())
def test_nothing_of_a_share_is_idle_while_a_job_that_could_train_fits(situation: Situation) -> None:
    demands, limits = situation
    limits = replace(limits, max_tokens=None)
    train = train_after(demands, plan_residents(demands, limits))
    could = sum(not demand.is_waiting or demand.may_run_ahead for demand in demands)
    share = limits.num_slots if limits.share is None else limits.share
    assert len(train) == min(could, share, limits.num_slots - len(limits.taken))


@given(situations())
def test_the_usual_batch_size_is_chosen_while_a_job_has_it(situation: Situation) -> None:
    demands, limits = situation
    limits = replace(limits, max_tokens=None)
    by_id = {demand.job: demand for demand in demands}
    sizes = Counter(demand.batch_size for demand in demands if demand.slot is not None and not demand.is_waiting)
    without_slot = {demand.job for demand in demands if demand.slot is None and not demand.is_waiting}
    for admission in plan_residents(demands, limits).admit:
        if admission.reason == "runs_ahead":
            assert not without_slot
            continue
        most = max(sizes.values(), default=0)
        usual = max((size for size, count in sizes.items() if count == most), default=None)
        available = {by_id[other].batch_size for other in without_slot}
        expected = usual if usual in available else max(available)
        assert by_id[admission.job].batch_size == expected
        sizes[expected] += 1
        without_slot.remove(admission.job)


def test_the_work_of_a_plan_grows_with_the_jobs_and_not_with_their_square() -> None:
    jobs = [job(f"job-{index:05d}", 2 ** (index % 6)) for index in range(10_000)]
    limits = ResidentLimits(num_slots=32, max_tokens=32 * 200)
    count, plan = num_calls(plan_residents, jobs, limits)
    assert count < 20 * len(jobs)
    assert plan.admit


def job(name: str, batch_size: int, **state: object) -> JobDemand:
    """Return a job whose rows have ten tokens."""
    return JobDemand(job=name, batch_size=batch_size, num_tokens=10 * batch_size, **state)


LARGEST, SAME, FILLS, ALONE, AHEAD = "largest_first", "same_batch_size", "fills_up", "alone", "runs_ahead"


@pytest.mark.parametrize(
    ("demands", "num_slots", "max_tokens", "park", "slot_of"),
    [
        ([], 3, None, [], []),
        ([job("a", 1), job("b", 8), job("c", 4)], 2, None, [], [("b", 0, LARGEST), ("c", 1, LARGEST)]),
        (
            [job("a", 1), job("b", 8), job("c", 8), job("d", 4)], 3, None,
            [], [("b", 0, LARGEST), ("c", 1, LARGEST), ("d", 2, LARGEST)],
        ),
        (
            [job("a", 2, slot=1), job("b", 8), job("c", 2)], 3, None,
            [], [("c", 0, SAME), ("b", 2, LARGEST)],
        ),
        ([job("a", 2), job("b", 2, has_started=True)], 1, None, [], [("b", 0, LARGEST)]),
        ([job("b", 2), job("a", 2)], 1, None, [], [("a", 0, LARGEST)]),
        ([job("a", 2, slot=0, is_waiting=True), job("b", 2)], 2, None, [], [("b", 1, LARGEST)]),
        (
            [job("b", 2, slot=0, is_waiting=True), job("a", 2, slot=1, is_waiting=True), job("c", 2)], 2, None,
            [("a", "slot_wanted")], [("c", 1, LARGEST)],
        ),
        ([job("a", 2, slot=0, is_waiting=True), job("b", 2, is_waiting=True)], 1, None, [], []),
        ([job("a", 2, slot=0), job("b", 8)], 1, None, [], []),
        # Tokens: 100 are left beside a; b is too large for them, c is not.
        ([job("a", 2, slot=0), job("b", 16), job("c", 8)], 3, 120, [], [("c", 1, FILLS)]),
        ([job("a", 2, slot=0), job("b", 8)], 2, 100, [], [("b", 1, LARGEST)]),
        ([job("a", 2, slot=0), job("b", 8)], 2, 99, [], []),
        ([job("a", 2, slot=0, is_waiting=True), job("b", 16)], 2, 120, [], [("b", 1, ALONE)]),
        ([job("a", 8, slot=0), job("b", 4, slot=1)], 2, 100, [("b", "over_limit")], []),
        # A job that may run ahead gets a slot that nobody wants, not one that a job waiting only for tokens needs.
        (
            [job("a", 2, slot=0), job("b", 2, is_waiting=True, may_run_ahead=True)], 2, None,
            [], [("b", 1, AHEAD)],
        ),
        (
            [job("a", 2, slot=0), job("b", 2, is_waiting=True, may_run_ahead=True), job("c", 1)], 2, None,
            [], [("c", 1, LARGEST)],
        ),
        (
            [job("a", 2, slot=0, is_waiting=True, may_run_ahead=True), job("b", 2, slot=1, is_waiting=True),
             job("c", 1)], 2, None,
            [("b", "slot_wanted")], [("c", 1, LARGEST)],
        ),
    ],
)  # fmt: skip
def test_preferences_and_their_reasons(
    demands: list[JobDemand],
    num_slots: int,
    max_tokens: int | None,
    park: list[tuple[str, str]],
    slot_of: list[tuple[str, int, str]],
) -> None:
    plan = plan_residents(demands, ResidentLimits(num_slots=num_slots, max_tokens=max_tokens))
    assert [(parking.job, parking.reason) for parking in plan.park] == park
    assert [(admission.job, admission.slot, admission.reason) for admission in plan.admit] == slot_of


def test_a_certain_job_without_tokens_keeps_its_slot_and_pauses() -> None:
    certain = job("a", 8, slot=0, is_waiting=True, may_run_ahead=True)
    plan = plan_residents([certain, job("b", 8, slot=1)], ResidentLimits(num_slots=2, max_tokens=100))
    assert plan == ResidentPlan()
    assert plan_residents([certain, job("b", 1, slot=1)], ResidentLimits(num_slots=2, max_tokens=100)).ahead == {"a"}


def law(*, step_s: float = 0.0, job_s: float = 0.0, token_s: float = 0.0) -> Throughput:
    return Throughput(step_s=step_s, job_s=job_s, token_s=token_s, eval_token_s=0.0, points=())


def test_where_tokens_alone_count_all_gpus_are_as_much_sooner_as_they_are_more() -> None:
    found = forecast_last_jobs([LastJob(num_tokens=100, num_steps=10)], law(token_s=0.01), 4)
    assert found is not None
    assert found.num_gpus == 1
    # A token of a step of four ranks costs a quarter of one on a rank of its own.
    assert found.spread_duration_s == pytest.approx(10 * 100 * 0.01)
    assert found.duration_s == pytest.approx(4 * found.spread_duration_s)


def test_where_steps_cost_what_they_cost_the_other_gpus_are_wasted() -> None:
    found = forecast_last_jobs([LastJob(num_tokens=100, num_steps=10)], law(step_s=0.5), 4)
    assert found is not None
    assert found.duration_s == found.spread_duration_s == pytest.approx(5.0)


def test_jobs_end_one_after_the_other() -> None:
    jobs = [LastJob(num_tokens=30, num_steps=5), LastJob(num_tokens=10, num_steps=20)]
    found = forecast_last_jobs(jobs, law(step_s=1.0, token_s=0.01, job_s=0.1), 4)
    assert found is not None
    assert found.num_gpus == 2
    assert found.duration_s == pytest.approx(5 * (1 + 0.4 + 1.2) + 15 * (1 + 0.4 + 0.4))
    assert found.spread_duration_s == pytest.approx(5 * (1 + 0.8 + 0.4) + 15 * (1 + 0.4 + 0.1))


@pytest.mark.parametrize("count", [0, 2, 3])
def test_no_tail_without_idle_ranks(count: int) -> None:
    assert forecast_last_jobs([LastJob(num_tokens=1, num_steps=1)] * count, law(step_s=1.0), 2) is None


class TestRungsAhead:
    """A rung ends jobs both ways, so their training after it counts in neither."""

    def test_the_one_that_finishes_trains_alone_from_there(self) -> None:
        jobs = [LastJob(num_tokens=10, num_steps=80, step=20)] * 3
        found = forecast_last_jobs(jobs, law(step_s=1.0, token_s=0.01), 4, places=[(0.2, 3), (0.4, 1)])
        assert found is not None
        assert found.num_gpus == 3
        assert found.duration_s == pytest.approx(80 * (1 + 4 * 10 * 0.01))
        assert found.spread_duration_s == pytest.approx(20 * (1 + 3 * 10 * 0.01) + 60 * (1 + 10 * 0.01))

    def test_the_one_with_the_most_work_is_thought_to_finish(self) -> None:
        jobs = [LastJob(num_tokens=10, num_steps=5, step=5), LastJob(num_tokens=40, num_steps=50, step=50)]
        found = forecast_last_jobs(jobs, law(token_s=0.01), 4, places=[(0.6, 1)])
        assert found is not None
        assert found.spread_duration_s == pytest.approx((1 * 10 + 50 * 40) * 0.01)

    def test_a_past_rung_ends_no_job(self) -> None:
        jobs = [LastJob(num_tokens=10, num_steps=10, step=90)] * 2
        found = forecast_last_jobs(jobs, law(step_s=1.0, job_s=0.1), 4, places=[(0.4, 1), (0.9, 1)])
        assert found is not None
        assert found.spread_duration_s == pytest.approx(10 * (1 + 4 * 2 * 0.1))

    def test_a_rung_between_two_steps_is_at_the_later_one(self) -> None:
        jobs = [LastJob(num_tokens=10, num_steps=7)] * 2
        found = forecast_last_jobs(jobs, law(step_s=1.0, job_s=0.1), 4, places=[(0.5, 1)])
        assert found is not None
        assert found.spread_duration_s == pytest.approx(4 * (1 + 4 * 2 * 0.1) + 3 * (1 + 4 * 0.1))
