"""Assigns jobs to the ranks of an executor with balanced load. Pure: every rank decides the same.

A step takes as long as the rank with the most tokens, so tokens are balanced over ranks: new jobs go to the rank with
the least load. If exits have left the ranks unbalanced, as few jobs as possible are moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

TOLERANCE = 0.05
"""Tolerated excess of the rank with the most tokens over the mean, as a share of the mean, before a job is moved."""

MAX_EXACT_JOBS = 8
"""Largest number of jobs that are assigned optimally; with more jobs, no single move or exchange improves the
assignment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSlots:
    """The slots of all ranks, numbered consecutively: first rank 0's slots, then rank 1's, and so on.

    Attributes:
        per_rank: Slots of the bank of each rank.
    """

    num_ranks: int
    per_rank: int

    @property
    def num_slots(self) -> int:
        return self.num_ranks * self.per_rank

    def rank_of(self, slot: int) -> int:
        """Return the rank whose bank has ``slot``."""
        return slot // self.per_rank

    def local_slot_of(self, slot: int) -> int:
        """Return the number of ``slot`` within the bank of its rank."""
        return slot % self.per_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDemand:
    """A job that trains.

    Attributes:
        num_tokens: Expected tokens of one of its steps, 1 or more.
        rank: Its current rank; None if moving it costs nothing.
    """

    job: str
    num_tokens: int
    rank: int | None = None


def imbalance(loads: Sequence[int]) -> float:
    """Return the excess of the largest of ``loads`` over the mean, as a share of the mean."""
    return max(loads) * len(loads) / sum(loads) - 1.0 if any(loads) else 0.0


def assign_ranks(demands: Iterable[RankDemand], slots: RankSlots) -> dict[str, int]:
    """Return a rank for every job, with at most ``slots.per_rank`` jobs a rank.

    A job that has a rank keeps it if the ranks are balanced to `TOLERANCE`, or cannot be balanced better. With up to
    `MAX_EXACT_JOBS` jobs, the number of moved jobs is the smallest with which the ranks are balanced, or are balanced
    as well as possible.

    The result depends only on its arguments, not on the order of ``demands``; called again with its own result, it
    moves no job.
    """
    ordered = tuple(sorted(demands, key=lambda demand: (-demand.num_tokens, demand.job)))
    assert len(ordered) <= slots.num_slots
    while True:
        rank_of = _better(ordered, slots)
        if all(demand.rank == rank_of[demand.job] for demand in ordered):
            return rank_of
        ordered = tuple(replace(demand, rank=rank_of[demand.job]) for demand in ordered)


def _better(ordered: Sequence[RankDemand], slots: RankSlots) -> dict[str, int]:
    """Return the rank of every job after one round; a job keeps its current rank unless moving improves the balance."""
    ranks = _Ranks(ordered, slots)
    ranks.fill()
    filled, before = ranks.rank_of, ranks.imbalance
    if before <= TOLERANCE:
        return filled
    ranks.even_out()
    found = ranks.rank_of if ranks.imbalance < before else filled
    return _AssignmentSearch(ordered, slots, found).best if len(ordered) <= MAX_EXACT_JOBS else found


class _Ranks:
    """An assignment of jobs to ranks, built by single moves and exchanges."""

    def __init__(self, ordered: Iterable[RankDemand], slots: RankSlots) -> None:
        self._demands = {demand.job: demand for demand in ordered}
        self._per_rank = slots.per_rank
        self._jobs: list[list[str]] = [[] for _ in range(slots.num_ranks)]
        self._loads = [0] * slots.num_ranks
        for demand in self._demands.values():
            if demand.rank is not None:
                self._put(demand.job, demand.rank)

    @property
    def rank_of(self) -> dict[str, int]:
        return {job: rank for rank, jobs in enumerate(self._jobs) for job in jobs}

    @property
    def imbalance(self) -> float:
        return imbalance(self._loads)

    def fill(self) -> None:
        """Put jobs without a rank, the largest first, on the rank with the least load."""
        for demand in self._demands.values():
            if demand.rank is None:
                free = (rank for rank, jobs in enumerate(self._jobs) if len(jobs) < self._per_rank)
                self._put(demand.job, min(free, key=lambda rank: (self._loads[rank], rank)))

    def even_out(self) -> None:
        """Move a job off the rank with the most tokens, alone or in exchange for a smaller one, while that helps."""
        while self.imbalance > TOLERANCE and self._improve():
            pass

    def _improve(self) -> bool:
        heaviest = max(range(len(self._loads)), key=lambda rank: (self._loads[rank], -rank))
        best: tuple[tuple[int, int, str, str, int], str, str | None, int] | None = None
        for job in self._jobs[heaviest]:
            for rank, others in enumerate(self._jobs):
                if rank == heaviest:
                    continue
                for other in (None, *others) if len(others) < self._per_rank else others:
                    after = self._larger_after(job, heaviest, other, rank)
                    # Among equally good moves, prefer to move new jobs.
                    cost = self._is_settled(job) + self._is_settled(other)
                    key = (after, cost, job, other or "", rank)
                    if after < self._loads[heaviest] and (best is None or key < best[0]):
                        best = key, job, other, rank
        if best is None:
            return False
        _, job, other, rank = best
        self._move(job, heaviest, rank)
        if other is not None:
            self._move(other, rank, heaviest)
        return True

    def _larger_after(self, job: str, heaviest: int, other: str | None, rank: int) -> int:
        """Return the larger of the two ranks' tokens after ``job`` leaves ``heaviest`` for ``rank`` in exchange for
        ``other``."""
        shift = self._demands[job].num_tokens - (self._demands[other].num_tokens if other is not None else 0)
        return max(self._loads[heaviest] - shift, self._loads[rank] + shift)

    def _is_settled(self, job: str | None) -> bool:
        return job is not None and self._demands[job].rank is not None

    def _put(self, job: str, rank: int) -> None:
        self._jobs[rank].append(job)
        self._loads[rank] += self._demands[job].num_tokens

    def _move(self, job: str, origin: int, rank: int) -> None:
        self._jobs[origin].remove(job)
        self._loads[origin] -= self._demands[job].num_tokens
        self._put(job, rank)


class _AssignmentSearch:
    """Depth-first search for the best assignment: balanced, or as balanced as possible, with the fewest moves.

    Args:
        start: A first assignment that only a better one replaces; the better it is, the more of the search is cut off.

    Attributes:
        best: The rank of every job.
    """

    def __init__(self, ordered: Sequence[RankDemand], slots: RankSlots, start: dict[str, int]) -> None:
        self._ordered = ordered
        self._per_rank = slots.per_rank
        self._total = sum(demand.num_tokens for demand in ordered)
        self._homes = {demand.rank for demand in ordered}
        # Lower bound of the largest load: some rank has the largest job, and with n ranks two of the n + 1 largest jobs
        # share a rank.
        pair = ordered[slots.num_ranks - 1 : slots.num_ranks + 1]
        least = max(ordered[0].num_tokens, sum(demand.num_tokens for demand in pair) if len(pair) == 2 else 0)
        self._floor = max(least * slots.num_ranks / self._total - 1.0, TOLERANCE)
        self._loads = [0] * slots.num_ranks
        self._counts = [0] * slots.num_ranks
        for demand in ordered:
            self._loads[start[demand.job]] += demand.num_tokens
        num_moved = sum(demand.rank not in (None, start[demand.job]) for demand in ordered)
        self.best, self._best_cost = start, self._cost(num_moved)
        self._loads = [0] * slots.num_ranks
        self._place({}, 0)

    def _cost(self, num_moved: int) -> tuple[float, int]:
        """Return the cost to minimise; it only grows as jobs are added."""
        return max(max(self._loads) * len(self._loads) / self._total - 1.0, self._floor), num_moved

    def _place(self, rank_of: dict[str, int], num_moved: int) -> None:
        """Try all ranks for the next job after those of ``rank_of``."""
        cost = self._cost(num_moved)
        if cost >= self._best_cost:
            return
        if len(rank_of) == len(self._ordered):
            self.best, self._best_cost = rank_of, cost
            return
        demand = self._ordered[len(rank_of)]
        for rank in self._choices(demand):
            self._loads[rank] += demand.num_tokens
            self._counts[rank] += 1
            self._place(rank_of | {demand.job: rank}, num_moved + (demand.rank not in (None, rank)))
            self._loads[rank] -= demand.num_tokens
            self._counts[rank] -= 1

    def _choices(self, demand: RankDemand) -> list[int]:
        """Return ranks with a free slot, the most promising first, and only one of several equivalent ranks."""
        alike: dict[object, int] = {}
        for rank, (load, count) in enumerate(zip(self._loads, self._counts, strict=True)):
            if count < self._per_rank:
                alike.setdefault(rank if rank in self._homes else (load, count), rank)
        return sorted(alike.values(), key=lambda rank: (rank != demand.rank, self._loads[rank], rank))
