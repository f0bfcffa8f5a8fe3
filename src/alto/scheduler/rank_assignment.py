"""Assigns the jobs of a plan to ranks: each to one rank, balanced, or each to all ranks (data parallel). Pure: the same
on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from alto.scheduler.ranks import RankDemand, RankSlots, assign_ranks
from alto.scheduler.residents import (
    Admission,
    AdmitReason,
    JobDemand,
    Parking,
    ParkReason,
    ResidentLimits,
    ResidentPlan,
)

__all__ = ["assign_slots"]


def assign_slots(plan: ResidentPlan, demands: Iterable[JobDemand], limits: ResidentLimits) -> ResidentPlan:
    """``plan``, which was made for a single bank, with its slots assigned to ranks of about equal load.

    Jobs with a slot and training jobs stay as planned. Training jobs are moved to balance their ranks (`assign_ranks`);
    a waiting job keeps its slot if training jobs do not need it, and else moves to a rank with a free slot. Jobs that
    are fewer than the ranks train data parallel on all of them, once none waits any more.

    Args:
        plan: Plan of resident jobs.
        demands: Jobs that have not ended.
        limits: Limits of the bank, with the number of ranks.
    """
    demands = sorted(demands, key=lambda demand: (-demand.num_tokens, demand.job))
    slots = RankSlots(num_ranks=limits.num_ranks, per_rank=limits.num_slots // limits.num_ranks)
    reasons = {admission.job: admission.reason for admission in plan.admit}
    parked = {parking.job for parking in plan.park}
    holders = [d for d in demands if d.job in reasons or (d.slot is not None and d.job not in parked)]
    training = [demand for demand in holders if not demand.is_waiting or demand.job in plan.ahead]
    is_data_parallel = (
        limits.may_data_parallel and len(training) == len(demands) and _gain_by_data_parallelism(training, slots)
    )
    if is_data_parallel:
        rank_of = {demand.job: 0 for demand in training}  # where the slot that is named lies; the others are alike
    else:
        rank_of = assign_ranks((_demand_of(demand, slots) for demand in training), slots)
        rank_of |= _make_way(rank_of, [demand for demand in holders if demand.job not in rank_of], slots)
    moving = [
        d
        for d in holders
        if d.slot is None or d.is_data_parallel != is_data_parallel or slots.rank_of(d.slot) != rank_of[d.job]
    ]
    taken = {demand.slot for demand in holders if demand not in moving}
    reason = AdmitReason.DATA_PARALLEL if is_data_parallel else AdmitReason.BALANCES
    admit: list[Admission] = []
    for demand in moving:
        slot = _first_free(rank_of[demand.job], slots, taken)
        taken.add(slot)
        admit.append(
            Admission(
                job=demand.job, slot=slot, reason=reasons.get(demand.job, reason), is_data_parallel=is_data_parallel
            )
        )
    moved = (Parking(job=d.job, reason=ParkReason.REBALANCED) for d in moving if d.slot is not None)
    return ResidentPlan(park=(*plan.park, *moved), admit=tuple(admit), ahead=plan.ahead)


def _gain_by_data_parallelism(training: Sequence[JobDemand], slots: RankSlots) -> bool:
    """Whether ranks would be idle otherwise, every bank has a slot for each, and some job has several rows a step."""
    return (
        len(training) < slots.num_ranks and len(training) <= slots.per_rank and any(d.batch_size > 1 for d in training)
    )


def _rank_of(demand: JobDemand, slots: RankSlots) -> int | None:
    """The rank whose bank has the job; None where none has it, or all have."""
    return None if demand.slot is None or demand.is_data_parallel else slots.rank_of(demand.slot)


def _demand_of(demand: JobDemand, slots: RankSlots) -> RankDemand:
    return RankDemand(job=demand.job, num_tokens=demand.num_tokens, rank=_rank_of(demand, slots))


def _make_way(rank_of: Mapping[str, int], waiting: Iterable[JobDemand], slots: RankSlots) -> dict[str, int]:
    """A rank for each of ``waiting``, in slots that jobs with the ranks ``rank_of`` leave free: its own rank where
    possible."""
    num_taken = Counter(rank_of.values())
    found: dict[str, int] = {}
    homeless: list[str] = []
    for demand in waiting:
        rank = _rank_of(demand, slots)
        if rank is not None and num_taken[rank] < slots.per_rank:
            found[demand.job] = rank
            num_taken[rank] += 1
        else:
            homeless.append(demand.job)
    for job in homeless:
        found[job] = min(range(slots.num_ranks), key=lambda rank: (num_taken[rank], rank))
        num_taken[found[job]] += 1
    return found


def _first_free(rank: int, slots: RankSlots, taken: Collection[int | None]) -> int:
    """The first slot of ``rank`` that is not ``taken``."""
    first = rank * slots.per_rank
    return next(slot for slot in range(first, first + slots.per_rank) if slot not in taken)
