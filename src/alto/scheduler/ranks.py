"""Which rank of an executor has which jobs, so that no rank waits long for another. Pure: every rank decides the same.

A step takes as long as the rank with the most tokens, so these are made even: by putting new jobs where least is done,
and, where exits have left the ranks uneven, by moving as few jobs as it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["TOLERANCE", "RankDemand", "RankSlots", "assign_ranks", "imbalance"]

TOLERANCE = 0.05
"""By how much of the mean the rank with the most tokens may be above it before a job is moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSlots:
    """The slots of all ranks, counted through: first those of rank 0, then those of rank 1, and so on.

    Attributes:
        per_rank: Slots of the bank of each.
    """

    num_ranks: int
    per_rank: int

    @property
    def num_slots(self) -> int:
        return self.num_ranks * self.per_rank

    def rank_of(self, slot: int) -> int:
        """The rank whose bank has ``slot``."""
        return slot // self.per_rank

    def place_of(self, slot: int) -> int:
        """Where ``slot`` lies in the bank of its rank."""
        return slot % self.per_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDemand:
    """A job that trains.

    Attributes:
        num_tokens: Tokens of one of its steps in expectation, 1 or more.
        rank: Where it is; None where moving it costs nothing.
    """

    job: str
    num_tokens: int
    rank: int | None = None


def imbalance(loads: Iterable[int]) -> float:
    """By how much of the mean the largest of ``loads`` is above it."""
    loads = list(loads)
    return max(loads) * len(loads) / sum(loads) - 1.0 if any(loads) else 0.0


def assign_ranks(demands: Iterable[RankDemand], slots: RankSlots) -> dict[str, int]:
    """A rank for every job, at most ``slots.per_rank`` jobs a rank; those that have one keep it where the ranks are
    even to `TOLERANCE`, or cannot be made more so.

    The result depends on its arguments alone, and not on the order of ``demands``; asked again with what it has
    answered, it moves nobody.
    """
    ordered = sorted(demands, key=lambda demand: (-demand.num_tokens, demand.job))
    assert len(ordered) <= slots.num_slots
    kept = _Ranks(ordered, slots)
    for demand in ordered:
        if demand.rank is not None:
            kept.put(demand.job, demand.rank)
    kept.fill()
    kept.even_out()
    if kept.imbalance <= TOLERANCE:
        return kept.rank_of
    fresh = _Ranks(ordered, slots)
    fresh.fill()
    fresh.even_out()
    if fresh.largest > (1.0 - TOLERANCE) * kept.largest:
        return kept.rank_of
    return _named_alike(fresh.rank_of, ordered, slots.num_ranks)


class _Ranks:
    """Jobs on ranks, while it is decided."""

    def __init__(self, ordered: Sequence[RankDemand], slots: RankSlots) -> None:
        self._tokens = {demand.job: demand.num_tokens for demand in ordered}
        self._settled = frozenset(demand.job for demand in ordered if demand.rank is not None)
        self._per_rank = slots.per_rank
        self._jobs: list[list[str]] = [[] for _ in range(slots.num_ranks)]
        self._loads = [0] * slots.num_ranks

    @property
    def rank_of(self) -> dict[str, int]:
        return {job: rank for rank, jobs in enumerate(self._jobs) for job in jobs}

    @property
    def imbalance(self) -> float:
        return imbalance(self._loads)

    @property
    def largest(self) -> int:
        return max(self._loads)

    def put(self, job: str, rank: int) -> None:
        self._jobs[rank].append(job)
        self._loads[rank] += self._tokens[job]

    def fill(self) -> None:
        """Put those that are nowhere, the largest first, where least is done."""
        placed = self.rank_of
        for job in self._tokens:
            if job not in placed:
                free = (rank for rank, jobs in enumerate(self._jobs) if len(jobs) < self._per_rank)
                self.put(job, min(free, key=lambda rank: (self._loads[rank], rank)))

    def even_out(self) -> None:
        """Move a job off the rank with the most, alone or in exchange for a smaller one, while that helps."""
        while self.imbalance > TOLERANCE and self._improve():
            pass

    def _improve(self) -> bool:
        heaviest = max(range(len(self._loads)), key=lambda rank: (self._loads[rank], -rank))
        before = self._loads[heaviest]
        best: tuple[tuple[int, int, str, str, int], str, str | None, int] | None = None
        for job in self._jobs[heaviest]:
            for rank, others in enumerate(self._jobs):
                if rank == heaviest:
                    continue
                for other in (None, *others) if len(others) < self._per_rank else others:
                    shift = self._tokens[job] - (self._tokens[other] if other is not None else 0)
                    after = max(before - shift, self._loads[rank] + shift)
                    if after >= before:
                        continue
                    cost = (job in self._settled) + (other in self._settled)
                    key = (after, cost, job, other or "", rank)
                    if best is None or key < best[0]:
                        best = key, job, other, rank
        if best is None:
            return False
        _, job, other, rank = best
        self._move(job, heaviest, rank)
        if other is not None:
            self._move(other, rank, heaviest)
        return True

    def _move(self, job: str, origin: int, rank: int) -> None:
        self._jobs[origin].remove(job)
        self._loads[origin] -= self._tokens[job]
        self.put(job, rank)


def _named_alike(rank_of: Mapping[str, int], ordered: Sequence[RankDemand], num_ranks: int) -> dict[str, int]:
    """The same sets of jobs, on ranks where most of their tokens are already."""
    stays = sorted(
        (
            (-sum(d.num_tokens for d in ordered if rank_of[d.job] == found and d.rank == rank), rank, found)
            for rank in range(num_ranks)
            for found in range(num_ranks)
        ),
    )
    name: dict[int, int] = {}
    for _, rank, found in stays:
        if found not in name and rank not in name.values():
            name[found] = rank
    return {job: name[found] for job, found in rank_of.items()}
