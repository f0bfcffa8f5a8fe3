"""Which jobs of a task sit in the bank's slots now, on which rank, and which train. Pure: the same in every replay, and
on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from alto.scheduler.ranks import RankDemand, RankSlots, assign_ranks

__all__ = [
    "JobDemand",
    "ParkReason",
    "Parking",
    "SeatReason",
    "Seating",
    "SeatingLimits",
    "SeatingPlan",
    "plan_residents",
]


class SeatReason(StrEnum):
    """Why a job is given a slot.

    ``same_batch_size``: most residents have its batch size. ``largest_first``: none that could be seated is larger.
    ``fills_up``: those it was preferred to are too large for the tokens that are left. ``alone``: it is larger than the
    limit, and nobody else trains. ``runs_ahead``: it is certain to be kept at its rung, and nobody else wants the room.
    ``balances``: the rank it was on had more to do than this one. ``spreads``: jobs are fewer than ranks, and so each
    of them trains on all ranks.
    """

    SAME_BATCH_SIZE = "same_batch_size"
    LARGEST_FIRST = "largest_first"
    FILLS_UP = "fills_up"
    ALONE = "alone"
    RUNS_AHEAD = "runs_ahead"
    BALANCES = "balances"
    SPREADS = "spreads"


class ParkReason(StrEnum):
    """Why a job loses its slot.

    ``slot_wanted``: it waits at its rung, and another can train. ``over_limit``: the residents have more tokens than
    the limit, which was lowered. ``rebalanced``: it goes on at once in a slot of another rank, or of all.
    """

    SLOT_WANTED = "slot_wanted"
    OVER_LIMIT = "over_limit"
    REBALANCED = "rebalanced"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDemand:
    """A job that has not ended.

    Attributes:
        job: Job id.
        batch_size: Rows of one of its steps.
        num_tokens: Tokens of one of its steps in expectation, rounded up.
        slot: Where it sits; None if it is pending or parked.
        is_spread: Its rows are spread over all ranks; the place of its slot is taken on each of them.
        is_waiting: It has reached a rung that the others have not.
        may_run_ahead: It waits, but is certain to be kept, so it may train on where nobody else can.
        has_started: It has trained before.
    """

    job: str
    batch_size: int
    num_tokens: int
    slot: int | None = None
    is_spread: bool = False
    is_waiting: bool = False
    may_run_ahead: bool = False
    has_started: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatingLimits:
    """How many jobs may sit, and how many may train.

    Attributes:
        num_slots: Slots of the bank.
        max_tokens: Tokens that a step of all jobs together may have in expectation; None sets no limit.
        num_ranks: Ranks that the slots are divided among, equally; see `RankSlots`.
        may_spread: Whether jobs that are fewer than the ranks may be spread over all of them.
    """

    num_slots: int
    max_tokens: int | None = None
    num_ranks: int = 1
    may_spread: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Parking:
    """A job that leaves its slot for now."""

    job: str
    reason: ParkReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Seating:
    """A job that gets a slot; one that is spread gets the same place on every rank, ``slot`` being the first's."""

    job: str
    slot: int
    reason: SeatReason
    is_spread: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatingPlan:
    """What changes, in this order, and who trains besides the residents that do not wait.

    Attributes:
        park: Jobs that leave their slots.
        seat: Jobs that get one.
        ahead: Waiting jobs with a slot that train on before their rung is held.
    """

    park: tuple[Parking, ...] = ()
    seat: tuple[Seating, ...] = ()
    ahead: frozenset[str] = frozenset()


def plan_residents(demands: Iterable[JobDemand], limits: SeatingLimits) -> SeatingPlan:
    """Fill the slots with jobs that can train, as far as their tokens fit.

    A resident that can train keeps its slot. Jobs without one come in decreasing batch size, those that share the batch
    size of most residents first, so that jobs of equal length run side by side; among equals, jobs that have started
    come before fresh ones, then the lower id. One that does not fit lets those after it pass; one that is larger than
    the limit is seated when nobody else trains. A resident that waits at a rung is parked only when its slot is wanted.
    The room that is left goes to waiting jobs that may run ahead, those with a slot first.

    On several ranks those that train are dealt out so that all have about as many tokens (`assign_ranks`), and jobs
    that are fewer than the ranks are spread over all of them, once none waits any more.

    The plan depends on its arguments alone, and not on the order of ``demands``; made again after it was carried out,
    it changes nothing.
    """
    demands = tuple(demands)
    training: list[JobDemand] = []
    waiting: list[JobDemand] = []
    applicants: list[JobDemand] = []
    certain: list[JobDemand] = []
    for demand in demands:
        if demand.slot is not None:
            (waiting if demand.is_waiting else training).append(demand)
        elif not demand.is_waiting:
            applicants.append(demand)
        elif demand.may_run_ahead:
            certain.append(demand)
    usual = _usual_batch_size(training)
    preference = _preference(usual)
    seats = _Seats(limits, training, waiting)
    for demand in sorted(training, key=preference):
        seats.keep_or_park(demand)
    # With all slots full of jobs that train, which is so at most steps, nothing is sorted.
    if seats.has_slot:
        seats.seat_all(sorted(applicants, key=preference), usual)
        seats.run_ahead(sorted(certain, key=preference))
    plan = SeatingPlan(park=tuple(seats.parked), seat=tuple(seats.seated), ahead=frozenset(seats.ahead))
    return plan if limits.num_ranks == 1 else _over_ranks(plan, demands, limits)


def _over_ranks(plan: SeatingPlan, demands: Sequence[JobDemand], limits: SeatingLimits) -> SeatingPlan:
    """``plan`` with slots on ranks that have about as much to do."""
    slots = RankSlots(num_ranks=limits.num_ranks, per_rank=limits.num_slots // limits.num_ranks)
    reasons = {seating.job: seating.reason for seating in plan.seat}
    parked = {parking.job for parking in plan.park}
    residents = [demand for demand in demands if demand.slot is not None and demand.job not in parked]
    training = [demand for demand in residents if not demand.is_waiting or demand.job in plan.ahead]
    training += [demand for demand in demands if demand.job in reasons]
    waiting = [demand for demand in residents if demand not in training]
    if limits.may_spread and _can_spread(demands, training, slots):
        reason, is_spread = SeatReason.SPREADS, True
        rank_of = {demand.job: 0 for demand in training}
    else:
        reason, is_spread = SeatReason.BALANCES, False
        rank_of = assign_ranks(
            (
                RankDemand(
                    job=demand.job,
                    num_tokens=demand.num_tokens,
                    rank=None if demand.slot is None or demand.is_spread else slots.rank_of(demand.slot),
                )
                for demand in training
            ),
            slots,
        )
    stay: list[JobDemand] = []
    move: list[JobDemand] = []
    for demand in training:
        is_there = demand.slot is not None and demand.is_spread == is_spread
        (stay if is_there and slots.rank_of(demand.slot or 0) == rank_of[demand.job] else move).append(demand)
    taken = {demand.slot for demand in (*stay, *waiting)}
    parkings = [*plan.park, *(Parking(job=d.job, reason=ParkReason.REBALANCED) for d in move if d.slot is not None)]
    seatings = []
    for demand in sorted(move, key=lambda demand: (-demand.num_tokens, demand.job)):
        first = rank_of[demand.job] * slots.per_rank
        free = [slot for slot in range(first, first + slots.per_rank) if slot not in taken]
        if not free:  # whoever waits there makes room
            leaver = next(d for d in waiting if d.slot is not None and slots.rank_of(d.slot) == rank_of[demand.job])
            waiting.remove(leaver)
            parkings.append(Parking(job=leaver.job, reason=ParkReason.SLOT_WANTED))
            free = [leaver.slot]  # type: ignore[list-item]
        taken.add(free[0])
        seatings.append(
            Seating(job=demand.job, slot=free[0], reason=reasons.get(demand.job, reason), is_spread=is_spread)
        )
    return SeatingPlan(park=tuple(parkings), seat=tuple(seatings), ahead=plan.ahead)


def _can_spread(demands: Sequence[JobDemand], training: Sequence[JobDemand], slots: RankSlots) -> bool:
    """Whether all jobs that are left train, are fewer than the ranks, and have rows to share out."""
    return (
        len(demands) == len(training) < slots.num_ranks
        and len(training) <= slots.per_rank
        and any(demand.batch_size > 1 for demand in training)
    )


class _Seats:
    """The slots and the tokens of a plan in the making."""

    def __init__(self, limits: SeatingLimits, training: Iterable[JobDemand], waiting: Iterable[JobDemand]) -> None:
        self._max_tokens = limits.max_tokens
        # Who may not run ahead has less use for a slot.
        self._leavers = sorted(waiting, key=lambda demand: (demand.may_run_ahead, demand.job))
        occupied = {demand.slot for demand in (*training, *self._leavers)}
        self._free = [slot for slot in range(limits.num_slots) if slot not in occupied]
        self._num_training = 0
        self._num_tokens = 0
        self.parked: list[Parking] = []
        self.seated: list[Seating] = []
        self.ahead: list[str] = []

    @property
    def has_slot(self) -> bool:
        return bool(self._free or self._leavers)

    def keep_or_park(self, resident: JobDemand) -> None:
        """A resident that can train does, unless a limit that was lowered is too low for it."""
        if self._fits(resident):
            self._count(resident)
        else:
            self._park(resident, ParkReason.OVER_LIMIT)

    def seat_all(self, applicants: Iterable[JobDemand], usual: int | None) -> None:
        """Seat as many as there is room for, in their order."""
        someone_passed = False
        for applicant in applicants:
            if not self.has_slot:
                return
            if not self._fits(applicant):
                someone_passed = True
            elif self._is_too_large(applicant):
                self._seat(applicant, SeatReason.ALONE)
            elif someone_passed:
                self._seat(applicant, SeatReason.FILLS_UP)
            else:
                same = applicant.batch_size == usual
                self._seat(applicant, SeatReason.SAME_BATCH_SIZE if same else SeatReason.LARGEST_FIRST)

    def run_ahead(self, certain: Iterable[JobDemand]) -> None:
        """Let waiting jobs train in what room is left: those that kept their slots, then ``certain`` ones without."""
        for resident in [leaver for leaver in self._leavers if leaver.may_run_ahead]:
            if self._fits(resident):
                self._leavers.remove(resident)
                self._count(resident)
                self.ahead.append(resident.job)
        for demand in certain:
            if self.has_slot and self._fits(demand):
                self._seat(demand, SeatReason.RUNS_AHEAD)
                self.ahead.append(demand.job)

    def _fits(self, demand: JobDemand) -> bool:
        return (
            self._max_tokens is None
            or not self._num_training
            or self._num_tokens + demand.num_tokens <= self._max_tokens
        )

    def _is_too_large(self, demand: JobDemand) -> bool:
        return self._max_tokens is not None and demand.num_tokens > self._max_tokens

    def _count(self, demand: JobDemand) -> None:
        self._num_training += 1
        self._num_tokens += demand.num_tokens

    def _seat(self, demand: JobDemand, reason: SeatReason) -> None:
        if not self._free:
            self._park(self._leavers.pop(0), ParkReason.SLOT_WANTED)
        self._count(demand)
        self.seated.append(Seating(job=demand.job, slot=self._free.pop(0), reason=reason))

    def _park(self, resident: JobDemand, reason: ParkReason) -> None:
        assert resident.slot is not None
        self.parked.append(Parking(job=resident.job, reason=reason))
        self._free.append(resident.slot)


def _usual_batch_size(training: Iterable[JobDemand]) -> int | None:
    """The batch size of most jobs that train, the largest of equals; None if there are none."""
    sizes = Counter(demand.batch_size for demand in training)
    return max(sizes, key=lambda size: (sizes[size], size), default=None)


def _preference(usual: int | None) -> Callable[[JobDemand], tuple[bool, int, bool, str]]:
    """Sorts those first that should be seated first."""
    return lambda demand: (demand.batch_size != usual, -demand.batch_size, not demand.has_started, demand.job)
