"""Decides which jobs of a task hold slots of the bank now, and which of them train.

Pure: every replay and every rank decides the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from alto.scheduler.ranks import RankDemand, RankSlots, assign_ranks


class AdmitReason(StrEnum):
    """Why a job gets a slot.

    - ``same_batch_size``: it has the batch size of most residents.
    - ``largest_first``: no job that could be admitted is larger.
    - ``fills_up``: the jobs preferred to it are too large for the remaining tokens.
    - ``alone``: it is larger than the limit, and no other job trains.
    - ``runs_ahead``: it is certain to be kept at its rung, and no other job can use the capacity.
    - ``balances``: it leaves a rank with more load than this one, or stops training data parallel on all ranks, or
      makes room for a job that does.
    - ``data_parallel``: there are fewer jobs than ranks, so each job trains on all ranks.
    """

    SAME_BATCH_SIZE = "same_batch_size"
    LARGEST_FIRST = "largest_first"
    FILLS_UP = "fills_up"
    ALONE = "alone"
    RUNS_AHEAD = "runs_ahead"
    BALANCES = "balances"
    DATA_PARALLEL = "data_parallel"


class ParkReason(StrEnum):
    """Why a job loses its slot.

    - ``slot_wanted``: it waits at its rung, and another job can train.
    - ``over_limit``: the residents have more tokens than the limit, which was lowered.
    - ``over_share``: its task now has fewer slots.
    - ``rebalanced``: it moves, in the same plan, to a slot of another rank, or of all ranks.
    """

    SLOT_WANTED = "slot_wanted"
    OVER_LIMIT = "over_limit"
    OVER_SHARE = "over_share"
    REBALANCED = "rebalanced"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDemand:
    """A job that has not ended.

    Attributes:
        num_tokens: Expected tokens of one of its steps, rounded up.
        slot: Its slot; None if it is pending or parked.
        is_data_parallel: Whether its rows are split over all ranks; it then has the same local slot on each rank.
        is_waiting: Whether it waits at a rung that other jobs have not reached.
        may_run_ahead: Whether it waits but is certain to be kept, so it may continue in an idle slot.
        has_started: Whether it has trained before.
    """

    job: str
    batch_size: int
    num_tokens: int
    slot: int | None = None
    is_data_parallel: bool = False
    is_waiting: bool = False
    may_run_ahead: bool = False
    has_started: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentLimits:
    """Limits on the jobs that are resident and on the jobs that train.

    Attributes:
        taken: Slots that jobs of other tasks hold in the same bank.
        share: Maximum number of slots that this task may hold at a time; None sets no limit.
        max_tokens: Maximum number of expected tokens of a step of all jobs together; None sets no limit.
        num_ranks: Ranks among which the slots are divided equally; see `RankSlots`.
        may_data_parallel: Whether jobs may train data parallel on all ranks when there are fewer jobs than ranks.
    """

    num_slots: int
    taken: frozenset[int] = frozenset()
    share: int | None = None
    max_tokens: int | None = None
    num_ranks: int = 1
    may_data_parallel: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Parking:
    """A job to be parked."""

    job: str
    reason: ParkReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A job that gets a slot; a data-parallel job gets the same local slot on every rank, and ``slot`` is the first
    rank's.

    Attributes:
        slot: Slot, numbered over all ranks.
    """

    job: str
    slot: int
    reason: AdmitReason
    is_data_parallel: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentPlan:
    """The jobs to park, then the jobs to admit, and the waiting jobs that train in addition to the other residents.

    Attributes:
        ahead: Waiting jobs with a slot that continue before their rung is decided.
    """

    park: tuple[Parking, ...] = ()
    admit: tuple[Admission, ...] = ()
    ahead: frozenset[str] = frozenset()


# Assigns the jobs of a plan to ranks: each job to one rank, with balanced load, or each job to all ranks (data
# parallel).
#
# Pure: every rank computes the same assignment.


def assign_slots(plan: ResidentPlan, demands: Iterable[JobDemand], limits: ResidentLimits) -> ResidentPlan:
    """Return ``plan``, which was made for a single bank, with its slots assigned to ranks of about equal load.

    Jobs with a slot and training jobs stay as planned. Training jobs are moved to balance the ranks (`assign_ranks`). A
    waiting job keeps its slot unless training jobs need it; then it moves to a rank with a free slot. If there are
    fewer jobs than ranks and no job waits, every job trains data parallel on all ranks.
    """
    demands = sorted(demands, key=lambda demand: (-demand.num_tokens, demand.job))
    slots = RankSlots(num_ranks=limits.num_ranks, per_rank=limits.num_slots // limits.num_ranks)
    reasons = {admission.job: admission.reason for admission in plan.admit}
    parked = {parking.job for parking in plan.park}
    holders = [d for d in demands if d.job in reasons or (d.slot is not None and d.job not in parked)]
    training = [demand for demand in holders if not demand.is_waiting or demand.job in plan.ahead]
    is_data_parallel = (
        limits.may_data_parallel and len(training) == len(demands) and _is_better_data_parallel(training, slots)
    )
    if is_data_parallel:
        rank_of = {demand.job: 0 for demand in training}  # the slot is named on rank 0; other ranks use the same one
    else:
        rank_of = assign_ranks(
            (RankDemand(job=d.job, num_tokens=d.num_tokens, rank=_rank_of(d, slots)) for d in training), slots
        )
        rank_of |= _place_waiting(rank_of, [demand for demand in holders if demand.job not in rank_of], slots)
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


def _is_better_data_parallel(training: Sequence[JobDemand], slots: RankSlots) -> bool:
    """Return whether ranks would be idle otherwise, every bank has a slot for each job, and some job has several rows a
    step."""
    return (
        len(training) < slots.num_ranks and len(training) <= slots.per_rank and any(d.batch_size > 1 for d in training)
    )


def _rank_of(demand: JobDemand, slots: RankSlots) -> int | None:
    """Return the rank whose bank has the job; None if no bank has it, or all have it."""
    return None if demand.slot is None or demand.is_data_parallel else slots.rank_of(demand.slot)


def _place_waiting(rank_of: Mapping[str, int], waiting: Iterable[JobDemand], slots: RankSlots) -> dict[str, int]:
    """Find a rank for each job of ``waiting`` in the slots that the jobs of ``rank_of`` leave free: its own rank if
    possible."""
    num_taken = Counter(rank_of.values())
    found: dict[str, int] = {}
    without_rank: list[str] = []
    for demand in waiting:
        rank = _rank_of(demand, slots)
        if rank is not None and num_taken[rank] < slots.per_rank:
            found[demand.job] = rank
            num_taken[rank] += 1
        else:
            without_rank.append(demand.job)
    for job in without_rank:
        found[job] = min(range(slots.num_ranks), key=lambda rank: (num_taken[rank], rank))
        num_taken[found[job]] += 1
    return found


def _first_free(rank: int, slots: RankSlots, taken: Collection[int | None]) -> int:
    """Return the first slot of ``rank`` that is not ``taken``."""
    first = rank * slots.per_rank
    return next(slot for slot in range(first, first + slots.per_rank) if slot not in taken)


def plan_residents(demands: Iterable[JobDemand], limits: ResidentLimits) -> ResidentPlan:
    """Fill the slots with jobs that can train, as far as their tokens fit.

    A resident job that can train keeps its slot. Jobs without a slot are admitted in this order: first jobs with the
    batch size of most residents, so that jobs of equal length run side by side; then by decreasing batch size; among
    equals, started jobs before fresh ones, then the lower id. A job that does not fit does not block the jobs after it.
    A job larger than the limit is admitted when no other job trains. A resident job that waits at a rung is parked only
    when another job needs its slot. The remaining token limit goes to waiting jobs that may run ahead, those with a
    slot first.

    On several ranks, the jobs that get a slot are then assigned to ranks (`alto.scheduler.intra_task`).

    The plan depends only on its arguments, not on the order of ``demands``. Planning again after the plan was carried
    out changes nothing.
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
    residents = _Residents(limits, training, waiting)
    for demand in residents.within_share(sorted(training, key=preference)):
        residents.keep_or_park(demand)
    # Usually all slots hold training jobs; then nothing needs to be sorted.
    if residents.has_slot:
        residents.admit_all(sorted(applicants, key=preference), usual)
        residents.run_ahead(sorted(certain, key=preference))
    plan = ResidentPlan(park=tuple(residents.parked), admit=tuple(residents.admitted), ahead=frozenset(residents.ahead))
    return plan if limits.num_ranks == 1 else assign_slots(plan, demands, limits)


class _Residents:
    """The slots and tokens of a plan while it is made."""

    def __init__(self, limits: ResidentLimits, training: Iterable[JobDemand], waiting: Iterable[JobDemand]) -> None:
        self._max_tokens = limits.max_tokens
        # Jobs that may not run ahead are parked first.
        self._leavers = sorted(waiting, key=lambda demand: (demand.may_run_ahead, demand.job))
        occupied = limits.taken.union(demand.slot for demand in (*training, *self._leavers) if demand.slot is not None)
        self._free = [slot for slot in range(limits.num_slots) if slot not in occupied]
        self._num_residents = len(occupied) - len(limits.taken)
        self._share = limits.num_slots if limits.share is None else limits.share
        self._num_training = 0
        self._num_tokens = 0
        self.parked: list[Parking] = []
        self.admitted: list[Admission] = []
        self.ahead: list[str] = []

    @property
    def has_slot(self) -> bool:
        """Whether another job can be admitted."""
        return self._has_free_slot or bool(self._leavers)

    @property
    def _has_free_slot(self) -> bool:
        return bool(self._free) and self._num_residents < self._share

    def within_share(self, training: Sequence[JobDemand]) -> Sequence[JobDemand]:
        """Park jobs until the slots are within the share, and return the jobs of ``training`` that keep their slots.

        Waiting jobs lose their slots first, then the last jobs of ``training``.
        """
        while self._leavers and self._num_residents > self._share:
            self._park(self._leavers.pop(0), ParkReason.OVER_SHARE)
        num_kept = min(len(training), self._share)
        for resident in training[num_kept:]:
            self._park(resident, ParkReason.OVER_SHARE)
        return training[:num_kept]

    def keep_or_park(self, resident: JobDemand) -> None:
        """Keep a resident that can train, or park it if it exceeds a token limit that was lowered."""
        if self._fits(resident):
            self._count(resident)
        else:
            self._park(resident, ParkReason.OVER_LIMIT)

    def admit_all(self, applicants: Iterable[JobDemand], usual: int | None) -> None:
        """Admit as many applicants as fit, in their order."""
        someone_passed = False
        for applicant in applicants:
            if not self.has_slot:
                return
            if not self._fits(applicant):
                someone_passed = True
            elif self._max_tokens is not None and applicant.num_tokens > self._max_tokens:
                self._admit(applicant, AdmitReason.ALONE)
            elif someone_passed:
                self._admit(applicant, AdmitReason.FILLS_UP)
            else:
                same = applicant.batch_size == usual
                self._admit(applicant, AdmitReason.SAME_BATCH_SIZE if same else AdmitReason.LARGEST_FIRST)

    def run_ahead(self, certain: Iterable[JobDemand]) -> None:
        """Let waiting jobs train within the remaining token limit: first those that kept their slots, then ``certain``
        ones."""
        for resident in [leaver for leaver in self._leavers if leaver.may_run_ahead]:
            if self._fits(resident):
                self._leavers.remove(resident)
                self._count(resident)
                self.ahead.append(resident.job)
        for demand in certain:
            if self.has_slot and self._fits(demand):
                self._admit(demand, AdmitReason.RUNS_AHEAD)
                self.ahead.append(demand.job)

    def _fits(self, demand: JobDemand) -> bool:
        return (
            self._max_tokens is None
            or not self._num_training
            or self._num_tokens + demand.num_tokens <= self._max_tokens
        )

    def _count(self, demand: JobDemand) -> None:
        self._num_training += 1
        self._num_tokens += demand.num_tokens

    def _admit(self, demand: JobDemand, reason: AdmitReason) -> None:
        if not self._has_free_slot:
            self._park(self._leavers.pop(0), ParkReason.SLOT_WANTED)
        self._count(demand)
        self._num_residents += 1
        self.admitted.append(Admission(job=demand.job, slot=self._free.pop(0), reason=reason))

    def _park(self, resident: JobDemand, reason: ParkReason) -> None:
        assert resident.slot is not None
        self.parked.append(Parking(job=resident.job, reason=reason))
        self._num_residents -= 1
        self._free.append(resident.slot)


def _usual_batch_size(training: Iterable[JobDemand]) -> int | None:
    """Return the batch size of most training jobs, the largest one in a tie; None if there are none."""
    sizes = Counter(demand.batch_size for demand in training)
    return max(sizes, key=lambda size: (sizes[size], size), default=None)


def _preference(usual: int | None) -> Callable[[JobDemand], tuple[bool, int, bool, str]]:
    """Return the sort key that puts the jobs to admit first."""
    return lambda demand: (demand.batch_size != usual, -demand.batch_size, not demand.has_started, demand.job)
