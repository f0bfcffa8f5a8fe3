"""The model of time and memory for tasks that share one executor.

Time. Alone, a task has ``own_s`` seconds of work on its own tokens, and ``step_s`` seconds that its steps take
regardless of the tokens trained. Tasks that share an executor step together, so the second part of each step is paid
once for all. Tokens are divided equally: while ``n`` members are active, own work of each is done at the rate

    u = 1 / (n + max_i(step_i / own_i)),

where the maximum is reached by the member whose steps are the most frequent. The step part of a member shrinks in
proportion to its own part, so ``step_i / own_i`` is constant, and members end in the order of ``own_i``. When one ends,
the others continue faster. So a member never takes less time than alone. All together take at least the sum of own work
plus the largest step part, and at most the sum of all durations. ``n`` equal tasks take ``n * own + step``.

Memory. A mix needs the largest base model and micro-batch, plus a bank whose slots are all as large as the largest.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from alto.records import Sharing
from alto.scheduler.inter_task.problem import TaskDemand

_LEAST_OWN = 1e-6
"""Smallest share of a task's duration that counts as own work; without any, its ``step_s / own_s`` would be
undefined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """The remaining work of one task of an executor.

    Attributes:
        own_s: Seconds of work on its own tokens.
        step_s: Seconds that its steps take regardless of the tokens trained.
    """

    own_s: float
    step_s: float

    @property
    def step_ratio(self) -> float:
        """Step seconds for each second of own work."""
        return self.step_s / self.own_s if self.own_s else 0.0


def member_of(duration_s: float, step_s: float) -> Member:
    """Return a member that takes ``duration_s`` seconds alone, ``step_s`` of them for its steps regardless of tokens.

    At least a millionth of the duration counts as own work.
    """
    own_s = max(duration_s - step_s, _LEAST_OWN * duration_s)
    return Member(own_s=own_s, step_s=duration_s - own_s)


def finish_times_s(members: Sequence[Member]) -> list[float]:
    """Return when each of ``members`` ends, in seconds from now, if all share an executor from now on."""
    order = _order_of_ends([member.own_s for member in members])
    ends_s, now_s, done = [0.0] * len(members), 0.0, 0.0
    for index, per_own_s in zip(order, _seconds_per_own(members, order), strict=True):
        own = members[index].own_s
        now_s, done = now_s + (own - done) * per_own_s, own
        ends_s[index] = now_s
    return ends_s


def members_ending_at(ends_s: Sequence[float], step_shares: Sequence[float]) -> list[Member]:
    """Return the members of an executor from their known ends: the inverse of :func:`finish_times_s`.

    Args:
        ends_s: When each member ends if it runs together with the others, in seconds from now.
        step_shares: Share of each member's duration alone that its steps take, in [0, 1].
    """
    unit = [member_of(1.0, share) for share in step_shares]
    order = _order_of_ends(ends_s)
    members, now_s, own_s = list(unit), 0.0, 0.0
    for index, per_own_s in zip(order, _seconds_per_own(unit, order), strict=True):
        own_s, now_s = own_s + (ends_s[index] - now_s) / per_own_s, ends_s[index]
        members[index] = Member(own_s=own_s, step_s=own_s * unit[index].step_ratio)
    return members


def alone_rates(members: Sequence[Member]) -> list[float]:
    """Return the speed of each member while all are active, relative to running alone; 1 for a single member."""
    if not members:
        return []
    (per_own_s, *_) = _seconds_per_own(members, range(len(members)))
    return [(1.0 + member.step_ratio) / per_own_s for member in members]


def fits(sharings: Iterable[Sharing]) -> bool:
    """Return whether tasks, with all their slots, fit together into the memory that each of them may plan with."""
    mix = list(sharings)
    bank_bytes = sum(sharing.num_slots for sharing in mix) * max(sharing.slot_bytes for sharing in mix)
    return max(sharing.pass_bytes for sharing in mix) + bank_bytes <= min(sharing.capacity_bytes for sharing in mix)


def _order_of_ends(ends: Sequence[float]) -> list[int]:
    return sorted(range(len(ends)), key=lambda index: (ends[index], index))


def _seconds_per_own(members: Sequence[Member], order: Sequence[int]) -> list[float]:
    """Return, in the order of ends, each member's seconds per second of own work until it ends.

    Each value holds while this member and the later ones are active.
    """
    latest_first = [members[index] for index in reversed(order)]
    overheads = itertools.accumulate((member.step_ratio for member in latest_first), max)
    return [count + overhead for count, overhead in enumerate(overheads, start=1)][::-1]


Division = tuple["Bin", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """An executor and the tasks planned for it.

    Attributes:
        tasks: The planned tasks; all of them may share.
        executor: The running executor that they join; empty: a new one.
        running: Sharing facts of the tasks that already run in it.
    """

    tasks: tuple[TaskDemand, ...] = ()
    executor: str = ""
    running: tuple[Sharing, ...] = ()

    def holds(self, *tasks: TaskDemand) -> bool:
        """Return whether ``tasks`` fit together with the tasks that run in it; a single task always does."""
        if len(tasks) + len(self.running) <= 1:
            return True
        return fits([*self.running, *map(_sharing, tasks)])


def divide(demands: Sequence[TaskDemand], bins: Sequence[Bin], loads_s: Sequence[float]) -> Division:
    """Put each task into the bin with the least load that can hold it, and return the bins. Tasks with the most own
    work come first.

    A task that fits into no bin gets a new one. The tasks of a bin share its steps, so only its first task adds the
    time of steps.

    Args:
        demands: Tasks that may all share.
        loads_s: Seconds of own work that each bin already has, or seconds until it can begin.
    """
    found, loads_s = list(bins), list(loads_s)
    heap = [(load_s, number) for number, load_s in enumerate(loads_s)]
    heapq.heapify(heap)
    for demand in sorted(demands, key=lambda demand: -_own_s(demand)):
        passed: list[tuple[float, int]] = []
        while heap and not found[heap[0][1]].holds(*found[heap[0][1]].tasks, demand):
            passed.append(heapq.heappop(heap))
        if heap:
            load_s, number = heapq.heappop(heap)
        else:
            load_s, number = 0.0, len(found)
            found.append(Bin())
        chosen = found[number]
        load_s += _own_s(demand) if chosen.tasks or chosen.running else demand.duration_s
        found[number] = replace(chosen, tasks=(*chosen.tasks, demand))
        for entry in (*passed, (load_s, number)):
            heapq.heappush(heap, entry)
    return tuple(found)


def neighbours(division: Sequence[Bin]) -> Iterator[Division]:
    """Yield the divisions in which one task moves to another bin or to a new one, or two tasks are swapped.

    Tasks of the first bins come first, and the last bins are tried first as their target.
    """
    bins = [item for item in division if item.tasks or item.executor]
    for here, item in enumerate(bins):
        for demand in item.tasks:
            left = replace(item, tasks=tuple(other for other in item.tasks if other is not demand))
            for there in reversed(range(len(bins))):
                target = bins[there]
                if there != here and target.holds(*target.tasks, demand):
                    yield _with(bins, {here: left, there: replace(target, tasks=(*target.tasks, demand))})
            if left.tasks or left.executor:
                yield (*_with(bins, {here: left}), Bin(tasks=(demand,)))
            for there in reversed(range(here + 1, len(bins))):
                for other in bins[there].tasks:
                    rest = tuple(found for found in bins[there].tasks if found is not other)
                    if left.holds(*left.tasks, other) and bins[there].holds(*rest, demand):
                        mine, theirs = (*left.tasks, other), (*rest, demand)
                        yield _with(bins, {here: replace(left, tasks=mine), there: replace(bins[there], tasks=theirs)})


def _with(bins: Sequence[Bin], changed: dict[int, Bin]) -> Division:
    return tuple(changed.get(number, item) for number, item in enumerate(bins))


def _own_s(demand: TaskDemand) -> float:
    return demand.duration_s - _sharing(demand).step_s


def _sharing(demand: TaskDemand) -> Sharing:
    assert demand.sharing is not None
    return demand.sharing
