"""Decides which jobs of a task hold slots of the bank now, and which of them train.

Pure: every replay and every rank decides the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from alto.scheduler.rank_assignment import assign_slots
from alto.scheduler.residents import (
    Admission,
    AdmitReason,
    JobDemand,
    Parking,
    ParkReason,
    ResidentLimits,
    ResidentPlan,
)

__all__ = ["plan_residents"]


def plan_residents(demands: Iterable[JobDemand], limits: ResidentLimits) -> ResidentPlan:
    """Fill the slots with jobs that can train, as far as their tokens fit.

    A resident job that can train keeps its slot. Jobs without a slot are admitted in this order: first jobs with the
    batch size of most residents, so that jobs of equal length run side by side; then by decreasing batch size; among
    equals, started jobs before fresh ones, then the lower id. A job that does not fit does not block the jobs after it.
    A job larger than the limit is admitted when no other job trains. A resident job that waits at a rung is parked only
    when another job needs its slot. The remaining token limit goes to waiting jobs that may run ahead, those with a
    slot first.

    On several ranks, the jobs that get a slot are then assigned to ranks (`alto.scheduler.rank_assignment`).

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
            elif self._is_too_large(applicant):
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

    def _is_too_large(self, demand: JobDemand) -> bool:
        return self._max_tokens is not None and demand.num_tokens > self._max_tokens

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
