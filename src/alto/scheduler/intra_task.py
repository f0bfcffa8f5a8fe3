"""Which jobs of a task sit in the bank's slots now. Pure: the same on every rank and in every replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["JobDemand", "SeatingPlan", "plan_residents"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDemand:
    """A job that has not ended.

    Attributes:
        job: Job id.
        batch_size: Rows of one of its steps.
        slot: Where it sits; None if it is pending or parked.
        is_waiting: It has reached a rung and cannot train before the others have.
        has_started: It has trained before.
    """

    job: str
    batch_size: int
    slot: int | None = None
    is_waiting: bool = False
    has_started: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatingPlan:
    """Jobs to park, then jobs to seat and the slot each gets."""

    park: tuple[str, ...]
    seat: tuple[tuple[str, int], ...]


def plan_residents(demands: Sequence[JobDemand], num_slots: int) -> SeatingPlan:
    """Fill the slots with jobs that can train.

    A resident that can train keeps its slot. Jobs without one come in decreasing batch size, those that share the batch
    size of most residents first, so that jobs of equal length run side by side; among equals, jobs that have started
    come before fresh ones, then the lower id. A resident that waits at a rung is parked only when its slot is wanted.
    """
    occupied = {demand.slot for demand in demands if demand.slot is not None}
    free = [slot for slot in range(num_slots) if slot not in occupied]
    waiting = sorted(
        (demand for demand in demands if demand.slot is not None and demand.is_waiting), key=lambda demand: demand.job
    )
    training = [demand for demand in demands if demand.slot is not None and not demand.is_waiting]
    applicants = [demand for demand in demands if demand.slot is None and not demand.is_waiting]

    sizes = Counter(demand.batch_size for demand in training)
    usual = max(sizes, key=lambda size: (sizes[size], size), default=None)
    applicants.sort(key=lambda d: (d.batch_size != usual, -d.batch_size, not d.has_started, d.job))

    park: list[str] = []
    seat: list[tuple[str, int]] = []
    for applicant in applicants:
        if not free and waiting:
            leaver = waiting.pop(0)
            assert leaver.slot is not None
            park.append(leaver.job)
            free.append(leaver.slot)
        if free:
            seat.append((applicant.job, free.pop(0)))
    return SeatingPlan(park=tuple(park), seat=tuple(seat))
