"""Schedules by OR-tools' CP-SAT: exact for some dozens of tasks, parts of the cluster at a time for thousands."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType

from alto.errors import UnsupportedError
from alto.records import Schedule
from alto.scheduler.inter_task.balance import balanced_seats
from alto.scheduler.inter_task.bounds import makespan_bound
from alto.scheduler.inter_task.cp_model import CpModel
from alto.scheduler.inter_task.lists import list_seats, priority_classes, seats_in_order
from alto.scheduler.inter_task.outcome import makespan_of, schedule_from
from alto.scheduler.inter_task.problem import SchedulingProblem, TaskDemand
from alto.scheduler.inter_task.seats import Seat, place
from alto.scheduler.inter_task.ticks import in_ticks

__all__ = ["cp_sat_schedule"]

_MAX_WHOLE = 500
"""Tasks times nodes up to which one model holds all of them."""

_TRIED_SEATS = 6_000
"""Of list schedules in other orders, before the solver is asked; a fraction of a second."""

_FINISH_SHARE = 0.1
"""Of the time left, for the sum of completion times, where the makespan need not be the least either."""

_RESERVE_S = 0.1
_RESERVE_SHARE = 0.1
"""For what comes after the solver, seconds or that share of little time: reading its answer, giving GPUs their numbers.
"""


def cp_sat_schedule(
    problem: SchedulingProblem, *, time_limit_s: float, hint: Schedule | None, gap: float = 0.0
) -> Schedule:
    """The least makespan, and of those schedules the one with the least sum of completion times.

    Priorities are solved one after the other, the highest first; those before are fixed, and the makespan counts from
    their end. Times are whole ticks (see :func:`in_ticks`) until the schedule is found; where that rounds, it may end
    as many ticks late as there are tasks, and the bound is lower by as much.

    The same problem, hint and unlimited time give the same schedule. Where the time ends the search, how far it came
    depends on the machine.

    Args:
        gap: See :func:`schedule_tasks`.

    Raises:
        UnsupportedError: OR-tools is not installed.
    """
    cp_model = _import_cp_model()
    deadline = time.monotonic() + time_limit_s - min(_RESERVE_S, _RESERVE_SHARE * time_limit_s)
    ticks, tick_s, is_exact = in_ticks(problem)
    classes = priority_classes(ticks)
    # Where ticks round, what lpt finds without them may be better after all.
    unrounded = place(problem, list_seats(problem, "lpt")) if len(classes) == 1 and not is_exact else None
    seats: list[Seat] = []
    bound_s, is_proven = makespan_bound(problem), True
    for number, demands in enumerate(classes):
        now = time.monotonic()
        share = now + (deadline - now) / (len(classes) - number)
        search = _Search(cp_model, replace(ticks, pending=demands), seats, hint, gap)
        search.run(share)
        seats += search.best
        is_proven = is_proven and search.is_proven
        if number == 0:
            # Later bounds hold for the seats that were taken before, not for every schedule.
            slack = 0 if is_exact else len(demands) + 1
            bound_s = max(bound_s, (search.bound - slack) * tick_s)
    placements = place(problem, seats)
    if unrounded is not None:
        placements = min(placements, unrounded, key=makespan_of)
    is_proven = is_proven and len(classes) <= 1
    return schedule_from("cp-sat", placements, bound_s=bound_s, status="optimal" if is_proven else "feasible")


def _import_cp_model() -> ModuleType:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise UnsupportedError(
            "method: cp-sat needs the package ortools, found none; "
            'pip install "alto-lora[scheduler]", or use method lpt'
        ) from error
    return cp_model


class _Search:
    """The search for seats of one priority; ``best`` is what it has, ``bound`` what it cannot beat."""

    def __init__(
        self,
        cp_model: ModuleType,
        problem: SchedulingProblem,
        taken: Sequence[Seat],
        hint: Schedule | None,
        gap: float,
    ) -> None:
        self._cp = cp_model
        self._gap = gap
        self._problem = problem
        self._taken = list(taken)
        self._floor = max((seat.end for seat in taken), default=0.0)
        # Ends are whole ticks.
        self.bound = max(math.ceil(makespan_bound(problem) - 1e-6), self._floor)
        self._hinted = {placement.task: placement for placement in hint.placements} if hint is not None else {}
        orders = [
            sorted(problem.pending, key=self._hinted_start),
            sorted(problem.pending, key=lambda demand: -demand.duration_s),
            sorted(problem.pending, key=lambda demand: -demand.duration_s * demand.num_gpus),
            sorted(problem.pending, key=lambda demand: (-demand.num_gpus, -demand.duration_s)),
            sorted(problem.pending, key=lambda demand: demand.duration_s),
        ]
        self.best = min((self._seats_in(order) for order in orders), key=self._cost)

    @property
    def is_proven(self) -> bool:
        return self._makespan(self.best) <= self.bound

    def run(self, deadline: float) -> None:
        if len(self._problem.pending) * len(self._problem.nodes) <= _MAX_WHOLE:
            self._solve_whole(deadline)
        elif self._nodes_are_apart():
            now = time.monotonic()
            self._balance(now + 0.7 * (deadline - now))
            self._finish_nodes_sooner(deadline)
        else:
            self._try_orders(deadline, times=sys.maxsize)

    def _hinted_start(self, demand: TaskDemand) -> tuple[float, float]:
        """Tasks that the earlier schedule does not know come last, longest first."""
        start_s = self._hinted[demand.task].start_s if demand.task in self._hinted else math.inf
        return start_s, -demand.duration_s

    def _seats_in(self, order: Sequence[TaskDemand]) -> list[Seat]:
        return seats_in_order(self._problem, order, taken=self._taken)

    def _makespan(self, seats: Sequence[Seat]) -> float:
        return max((seat.end for seat in seats), default=self._floor)

    def _cost(self, seats: Sequence[Seat]) -> tuple[float, float]:
        return max(self._makespan(seats), self._floor), sum(seat.end for seat in seats)

    def _keep(self, seats: Sequence[Seat]) -> bool:
        if not seats or self._cost(seats) >= self._cost(self.best):
            return False
        self.best = list(seats)
        return True

    def _solve_whole(self, deadline: float) -> None:
        if self._nodes_are_apart() and len(self._problem.nodes) > 1:
            now = time.monotonic()
            self._balance(now + 0.7 * (deadline - now))
        # Wide tasks between narrow ones: what a solver finds late, other orders find soon.
        now = time.monotonic()
        self._try_orders(now + 0.1 * (deadline - now), times=_TRIED_SEATS // len(self._problem.pending))
        if self._is_too_long():
            model = CpModel(self._cp, self._problem, self._taken, self._makespan(self.best))
            now = time.monotonic()
            solved = model.least_makespan(
                self.best, at_least=self.bound, deadline=now + 0.7 * (deadline - now), gap=self._gap
            )
            self._keep(solved.seats)
            self.bound = max(self.bound, solved.bound)
        makespan = max(self._makespan(self.best), self._floor)
        model = CpModel(self._cp, self._problem, self._taken, makespan)
        if self._gap:
            now = time.monotonic()
            deadline = now + _FINISH_SHARE * (deadline - now)
        self._keep(model.least_completions(self.best, makespan=makespan, deadline=deadline, gap=self._gap).seats)

    def _nodes_are_apart(self) -> bool:
        """Whether nothing but the GPUs of its own node keeps a task from starting."""
        return not self._taken and not any(
            demand.release_s or demand.tenant in self._problem.quotas or len(seat.counts) > 1
            for seat in self.best
            for demand in (seat.demand,)
        )

    def _balance(self, deadline: float) -> None:
        # Of the earlier schedule, too, which tasks share a node: stacked there at once, with no search.
        on_hinted = [replace(seat, counts=self._hinted_counts(seat)) for seat in self.best]
        self._keep(balanced_seats(self._problem, on_hinted, bound=math.inf, deadline=deadline))
        self._keep(balanced_seats(self._problem, self.best, bound=self.bound, deadline=deadline))

    def _hinted_counts(self, seat: Seat) -> Mapping[str, int]:
        """The one node of a task in the earlier schedule, if it can be there still; else that of ``seat``."""
        placement = self._hinted.get(seat.demand.task)
        names = {gpu.node for gpu in placement.gpus} if placement is not None else set()
        for name in names:
            if len(names) == 1 and len(self._problem.gpus_by_node.get(name, ())) >= seat.demand.num_gpus:
                return {name: seat.demand.num_gpus}
        return seat.counts

    def _part(self, names: Sequence[str]) -> tuple[SchedulingProblem, list[Seat]]:
        inside = [seat for seat in self.best if set(seat.counts) <= set(names)]
        problem = replace(
            self._problem,
            nodes=tuple(node for node in self._problem.nodes if node.name in names),
            pending=tuple(seat.demand for seat in inside),
        )
        return problem, inside

    def _replace(self, names: Sequence[str], seats: Sequence[Seat]) -> None:
        self.best = [seat for seat in self.best if not set(seat.counts) <= set(names)] + list(seats)

    def _finish_nodes_sooner(self, deadline: float) -> None:
        """Node by node, the least sum of completion times that keeps the makespan."""
        makespan = self._makespan(self.best)
        names = [node.name for node in self._problem.nodes]
        for number, name in enumerate(names):
            problem, inside = self._part([name])
            now = time.monotonic()
            if now >= deadline:
                return
            if inside:
                model = CpModel(self._cp, problem, (), makespan)
                share = now + (deadline - now) / (len(names) - number)
                solved = model.least_completions(inside, makespan=makespan, deadline=share, gap=self._gap)
                if solved.seats and sum(seat.end for seat in solved.seats) < sum(seat.end for seat in inside):
                    self._replace([name], solved.seats)

    def _is_too_long(self) -> bool:
        return self._makespan(self.best) > self.bound * (1.0 + self._gap)

    def _try_orders(self, deadline: float, *, times: int) -> None:
        """Move tasks to other places in the order of a list schedule, so often, and keep what is better."""
        generator = random.Random(0)
        order = sorted(self.best, key=lambda seat: seat.start)
        demands = [seat.demand for seat in order]
        for _ in range(times):
            if time.monotonic() >= deadline or not self._is_too_long():
                return
            tried = list(demands)
            for _ in range(generator.randint(1, 4)):
                tried.insert(generator.randrange(len(tried)), tried.pop(generator.randrange(len(tried))))
            if self._keep(self._seats_in(tried)):
                demands = tried
