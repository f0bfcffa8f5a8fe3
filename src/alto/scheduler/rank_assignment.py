"""Assigns the jobs of a plan to ranks: each job to one rank, with balanced load, or each job to all ranks (data
parallel).

Pure: every rank computes the same assignment.
"""

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
    """Return ``plan``, which was made for a single bank, with its slots assigned to ranks of about equal load.

    Jobs with a slot and training jobs stay as planned. Training jobs are moved to balance the ranks (`assign_ranks`). A
    waiting job keeps its slot unless training jobs need it; then it moves to a rank with a free slot. If there are
    fewer jobs than ranks and no job waits, every job trains data parallel on all ranks.

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
        rank_of = {demand.job: 0 for demand in training}  # the slot is named on rank 0; other ranks use the same one
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
    """Return whether ranks would be idle otherwise, every bank has a slot for each job, and some job has several rows a
    step."""
    return (
        len(training) < slots.num_ranks and len(training) <= slots.per_rank and any(d.batch_size > 1 for d in training)
    )


def _rank_of(demand: JobDemand, slots: RankSlots) -> int | None:
    """Return the rank whose bank has the job; None if no bank has it, or all have it."""
    return None if demand.slot is None or demand.is_data_parallel else slots.rank_of(demand.slot)


def _demand_of(demand: JobDemand, slots: RankSlots) -> RankDemand:
    return RankDemand(job=demand.job, num_tokens=demand.num_tokens, rank=_rank_of(demand, slots))


def _make_way(rank_of: Mapping[str, int], waiting: Iterable[JobDemand], slots: RankSlots) -> dict[str, int]:
    """Find a rank for each job of ``waiting`` in the slots that the jobs of ``rank_of`` leave free: its own rank if
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
    """Return the first slot of ``rank`` that is not ``taken``."""
    first = rank * slots.per_rank
    return next(slot for slot in range(first, first + slots.per_rank) if slot not in taken)
