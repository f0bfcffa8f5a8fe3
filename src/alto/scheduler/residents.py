"""The types of admission: what jobs need, what the bank allows, and a plan of which job has which slot."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "Admission",
    "AdmitReason",
    "JobDemand",
    "ParkReason",
    "Parking",
    "ResidentLimits",
    "ResidentPlan",
]


class AdmitReason(StrEnum):
    """Why a job gets a slot.

    ``same_batch_size``: most residents have its batch size. ``largest_first``: none that could be admitted is larger.
    ``fills_up``: those it was preferred to are too large for the tokens that are left. ``alone``: it is larger than the
    limit, and no other job trains. ``runs_ahead``: it is certain to be kept at its rung, and no other job can use the
    capacity. ``balances``: it leaves a rank that has more to do than this one, or all ranks, or frees a slot for one
    that does. ``data_parallel``: jobs are fewer than ranks, and so each of them trains on all ranks.
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

    ``slot_wanted``: it waits at its rung, and another can train. ``over_limit``: the residents have more tokens than
    the limit, which was lowered. ``over_share``: the slots of its task have become fewer. ``rebalanced``: it is
    put at once into a slot of another rank, or of all.
    """

    SLOT_WANTED = "slot_wanted"
    OVER_LIMIT = "over_limit"
    OVER_SHARE = "over_share"
    REBALANCED = "rebalanced"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDemand:
    """A job that has not ended.

    Attributes:
        job: Job id.
        batch_size: Rows of one of its steps.
        num_tokens: Tokens of one of its steps in expectation, rounded up.
        slot: Its slot; None if it is pending or parked.
        is_data_parallel: Its rows are split over all ranks; it has the same local slot on each of them.
        is_waiting: It has reached a rung that the others have not.
        may_run_ahead: It waits, but is certain to be kept, so it may continue in an idle slot.
        has_started: It has trained before.
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
    """How many jobs may be resident, and how many may train.

    Attributes:
        num_slots: Slots of the bank.
        taken: Slots that jobs of other tasks in the same bank have.
        share: Most slots that this task may have at a time; None sets no limit.
        max_tokens: Tokens that a step of all jobs together may have in expectation; None sets no limit.
        num_ranks: Ranks that the slots are divided among, equally; see `RankSlots`.
        may_data_parallel: Whether jobs that are fewer than the ranks may train data parallel on all of them.
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
    """A job that gets a slot; one that is data parallel gets the same local slot on every rank, ``slot`` being the
    first's.

    Attributes:
        job: Job id.
        slot: Slot, numbered over all ranks.
        reason: Why it gets the slot.
        is_data_parallel: Whether all ranks train it.
    """

    job: str
    slot: int
    reason: AdmitReason
    is_data_parallel: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentPlan:
    """The changes, in this order, and the waiting jobs that train besides the other residents.

    Attributes:
        park: Jobs that leave their slots.
        admit: Jobs that get one.
        ahead: Waiting jobs with a slot that continue before their rung is decided.
    """

    park: tuple[Parking, ...] = ()
    admit: tuple[Admission, ...] = ()
    ahead: frozenset[str] = frozenset()
