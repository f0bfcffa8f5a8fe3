"""Jobs on ranks: invariants for any jobs, and brute force as an oracle for few jobs."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from counting import num_calls
from hypothesis import given
from hypothesis import strategies as st

from alto.scheduler import RankDemand, RankSlots, assign_ranks, imbalance
from alto.scheduler.ranks import TOLERANCE

Situation = tuple[list[RankDemand], RankSlots]


@st.composite
def situations(draw: st.DrawFn, *, max_jobs: int = 24, max_ranks: int = 6) -> Situation:
    """Draw jobs, some with a rank and some new."""
    slots = RankSlots(num_ranks=draw(st.integers(2, max_ranks)), per_rank=draw(st.integers(1, 6)))
    count = draw(st.integers(0, min(max_jobs, slots.num_slots)))
    tokens = st.sampled_from([40, 80, 160, 320]) if draw(st.booleans()) else st.integers(1, 500)
    slot_of = list(draw(st.permutations(range(slots.num_slots))))
    demands = []
    for index, slot in enumerate(slot_of[:count]):
        rank = slots.rank_of(slot) if draw(st.integers(0, 3)) else None
        demands.append(RankDemand(job=f"job-{index:03d}", num_tokens=draw(tokens), rank=rank))
    return demands, slots


def loads_of(demands: Sequence[RankDemand], rank_of: dict[str, int], slots: RankSlots) -> list[int]:
    loads = [0] * slots.num_ranks
    for demand in demands:
        loads[rank_of[demand.job]] += demand.num_tokens
    return loads


def unevenness(demands: Sequence[RankDemand], rank_of: dict[str, int], slots: RankSlots) -> float:
    return imbalance(loads_of(demands, rank_of, slots))


def num_moved(demands: Sequence[RankDemand], rank_of: dict[str, int]) -> int:
    return sum(demand.rank not in (None, rank_of[demand.job]) for demand in demands)


def all_ways(demands: Sequence[RankDemand], slots: RankSlots) -> Iterator[dict[str, int]]:
    for ranks in itertools.product(range(slots.num_ranks), repeat=len(demands)):
        if max(Counter(ranks).values(), default=0) <= slots.per_rank:
            yield {demand.job: rank for demand, rank in zip(demands, ranks, strict=True)}


def test_slots_are_counted_through_the_ranks() -> None:
    slots = RankSlots(num_ranks=3, per_rank=2)
    assert [(slots.rank_of(slot), slots.local_slot_of(slot)) for slot in range(slots.num_slots)] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(("loads", "expected"), [([], 0.0), ([0, 0], 0.0), ([5, 5], 0.0), ([8, 4, 0], 1.0)])
def test_imbalance(loads: list[int], expected: float) -> None:
    assert imbalance(loads) == expected


@given(situations())
def test_everybody_has_a_rank_and_no_rank_more_jobs_than_slots(situation: Situation) -> None:
    demands, slots = situation
    rank_of = assign_ranks(demands, slots)
    assert rank_of.keys() == {demand.job for demand in demands}
    assert set(rank_of.values()) <= set(range(slots.num_ranks))
    assert max(Counter(rank_of.values()).values(), default=0) <= slots.per_rank


@given(situations(), st.randoms(use_true_random=False))
def test_the_order_of_the_demands_does_not_matter(situation: Situation, shuffler: random.Random) -> None:
    demands, slots = situation
    shuffled = list(demands)
    shuffler.shuffle(shuffled)
    assert assign_ranks(shuffled, slots) == assign_ranks(demands, slots)


@given(situations())
def test_a_second_call_moves_no_job(situation: Situation) -> None:
    demands, slots = situation
    rank_of = assign_ranks(demands, slots)
    assert assign_ranks([replace(demand, rank=rank_of[demand.job]) for demand in demands], slots) == rank_of


@given(situations())
def test_no_job_moves_while_the_ranks_are_even_and_otherwise_only_to_balance_them(situation: Situation) -> None:
    demands, slots = situation
    settled = [demand for demand in demands if demand.rank is not None]
    stay = {demand.job: demand.rank for demand in settled if demand.rank is not None}
    rank_of = assign_ranks(settled, slots)
    before, after = (unevenness(settled, ranks, slots) for ranks in (stay, rank_of))
    assert rank_of == stay if before <= TOLERANCE else rank_of == stay or after < before


@given(situations(max_jobs=6, max_ranks=4))
def test_few_jobs_are_as_even_as_can_be_with_the_fewest_moves(situation: Situation) -> None:
    demands, slots = situation
    found = assign_ranks(demands, slots)

    def cost(rank_of: dict[str, int]) -> tuple[float, int]:
        return max(unevenness(demands, rank_of, slots), TOLERANCE), num_moved(demands, rank_of)

    assert cost(found) == min(map(cost, all_ways(demands, slots)))


@pytest.mark.parametrize(("num_ranks", "num_jobs"), [(2, 8), (3, 8), (4, 7)])
@pytest.mark.parametrize("seed", range(4))
def test_ranks_are_even_wherever_brute_force_can_make_them_so(num_ranks: int, num_jobs: int, seed: int) -> None:
    dice = random.Random(seed)
    slots = RankSlots(num_ranks=num_ranks, per_rank=4)
    # Rows of ten tokens; half of the instances are cut from equal ranks, so that they can be balanced.
    demands = [RankDemand(job=f"job-{index}", num_tokens=10 * dice.randint(1, 16)) for index in range(num_jobs)]
    if seed % 2:
        shares = [num_jobs // num_ranks + (rank < num_jobs % num_ranks) for rank in range(num_ranks)]
        tokens = [part for share in shares for part in cut(240, share, dice)]
        demands = [replace(demand, num_tokens=part) for demand, part in zip(demands, tokens, strict=True)]
    least = min(unevenness(demands, rank_of, slots) for rank_of in all_ways(demands, slots))
    assert seed % 2 == 0 or least == 0.0
    assert unevenness(demands, assign_ranks(demands, slots), slots) <= max(least, TOLERANCE)


def cut(total: int, num_parts: int, dice: random.Random) -> list[int]:
    marks = [0, *sorted(dice.sample(range(1, total), num_parts - 1)), total]
    return [end - start for start, end in itertools.pairwise(marks)]


def test_what_single_moves_and_exchanges_miss_is_found() -> None:
    """Largest first gives 3, 2, 2 and 3, 2; only exchanging two jobs for one balances that."""
    slots = RankSlots(num_ranks=2, per_rank=4)
    demands = [RankDemand(job=f"job-{index}", num_tokens=tokens) for index, tokens in enumerate([3, 3, 2, 2, 2])]
    assert unevenness(demands, assign_ranks(demands, slots), slots) == 0.0


def test_an_exit_moves_as_many_as_it_must() -> None:
    """After 8 leaves 8 1 | 7 2 | 6 3 | 5 4, the best possible maximum is seven: 1 6 | 7 | 3 4 | 5 2."""
    slots = RankSlots(num_ranks=4, per_rank=3)
    left = {1: 0, 7: 1, 2: 1, 6: 2, 3: 2, 5: 3, 4: 3}
    demands = [RankDemand(job=f"job-{size}", num_tokens=100 * size, rank=rank) for size, rank in left.items()]
    rank_of = assign_ranks(demands, slots)
    assert loads_of(demands, rank_of, slots) == [700] * 4
    assert {d.job for d in demands if rank_of[d.job] != d.rank} == {"job-6", "job-4", "job-2"}


def test_an_exit_of_equal_jobs_moves_no_job() -> None:
    """With seven equal jobs on four ranks some rank has two, whatever moves."""
    demands = [RankDemand(job=f"job-{index}", num_tokens=100, rank=index % 4) for index in range(7)]
    assert num_moved(demands, assign_ranks(demands, RankSlots(num_ranks=4, per_rank=2))) == 0


def test_one_that_has_just_come_moves_rather_than_one_that_sits() -> None:
    """The only free slot is on the fullest rank. Two exchanges help, and the first one costs one move."""
    slots = RankSlots(num_ranks=2, per_rank=5)
    demands = [RankDemand(job=f"a-{index}", num_tokens=200, rank=0) for index in range(4)]
    demands += [RankDemand(job=f"b-{index}", num_tokens=100, rank=1) for index in range(5)]
    demands += [RankDemand(job="new", num_tokens=200)]
    rank_of = assign_ranks(demands, slots)
    assert loads_of(demands, rank_of, slots) == [800, 700]
    assert num_moved(demands, rank_of) == 3


@pytest.mark.parametrize("num_ranks", [4, 8, 64])
def test_many_jobs_of_the_usual_batch_sizes_are_even(num_ranks: int) -> None:
    dice = random.Random(num_ranks)
    slots = RankSlots(num_ranks=num_ranks, per_rank=8)
    demands = [
        RankDemand(job=f"job-{index:03d}", num_tokens=256 * dice.choice([1, 2, 4, 8])) for index in range(6 * num_ranks)
    ]
    count, rank_of = num_calls(assign_ranks, demands, slots)
    assert count < 1e6, "it is decided at every exit"
    assert unevenness(demands, rank_of, slots) <= TOLERANCE
    # a fifth of them ends
    left = [replace(d, rank=rank_of[d.job]) for d in demands if dice.random() < 0.8]
    again = assign_ranks(left, slots)
    assert unevenness(left, again, slots) <= TOLERANCE
    assert num_moved(left, again) < len(left) / 3
