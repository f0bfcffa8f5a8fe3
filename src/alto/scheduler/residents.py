"""The types of admission: the needs of jobs, the limits of the bank, and the plan that gives jobs their slots."""

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
    - ``rebalanced``: it moves at once to a slot of another rank, or of all ranks.
    """

    SLOT_WANTED = "slot_wanted"
    OVER_LIMIT = "over_limit"
    OVER_SHARE = "over_share"
    REBALANCED = "rebalanced"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDemand:
    """A job that has not ended.

    Attributes:
        batch_size: Rows of one of its steps.
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
        num_slots: Slots of the bank.
        taken: Slots that jobs of other tasks hold in the same bank.
        share: Most slots that this task may hold at a time; None sets no limit.
        max_tokens: Most expected tokens of a step of all jobs together; None sets no limit.
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
        reason: Why it gets the slot.
        is_data_parallel: Whether all ranks train it.
    """

    job: str
    slot: int
    reason: AdmitReason
    is_data_parallel: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentPlan:
    """The jobs to park, then the jobs to admit, and the waiting jobs that train besides the other residents.

    Attributes:
        park: Jobs that leave their slots.
        admit: Jobs that get a slot.
        ahead: Waiting jobs with a slot that continue before their rung is decided.
    """

    park: tuple[Parking, ...] = ()
    admit: tuple[Admission, ...] = ()
    ahead: frozenset[str] = frozenset()
