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
from alto.scheduler.inter_task.balance import balanced_reservations
from alto.scheduler.inter_task.bounds import makespan_bound
from alto.scheduler.inter_task.cp_model import CpModel
from alto.scheduler.inter_task.lists import list_reservations, priority_classes, reservations_in_order
from alto.scheduler.inter_task.outcome import makespan_of, schedule_from
from alto.scheduler.inter_task.problem import SchedulingProblem, TaskDemand
from alto.scheduler.inter_task.reservations import Reservation, place
from alto.scheduler.inter_task.ticks import in_ticks

__all__ = ["cp_sat_schedule"]

_MAX_WHOLE = 500
"""Largest product of tasks and nodes that is solved in one model."""

_TRIED_SEATS = 6_000
"""Number of tasks placed in list schedules of other orders, before the solver runs; this takes a fraction of a
second."""

_FINISH_SHARE = 0.1
"""Share of the remaining time for minimizing the sum of completion times, if a gap is allowed."""

_RESERVE_S = 0.1
_RESERVE_SHARE = 0.1
"""Time reserved after the solver, in seconds or as a share of a short limit: to read its answer and to number GPUs."""


def cp_sat_schedule(
    problem: SchedulingProblem, *, time_limit_s: float, hint: Schedule | None, gap: float = 0.0
) -> Schedule:
    """Find the schedule with the least makespan, and among those the one with the least sum of completion times.

    Priorities are solved one after the other, the highest first; earlier ones are then fixed, and the makespan counts
    from their end. Times are whole ticks (see :func:`in_ticks`) until the schedule is found. If ticks round, the
    schedule may end up to one tick per task later than the best, and the bound is lowered accordingly.

    The same problem and hint with unlimited time give the same schedule. If the time limit ends the search, the result
    depends on the machine.

    Args:
        problem: The scheduling problem.
        time_limit_s: Time limit of the search, in seconds.
        hint: An earlier schedule; None if there is none.
        gap: See :func:`schedule_tasks`.

    Raises:
        UnsupportedError: OR-tools is not installed.
    """
    cp_model = _import_cp_model()
    deadline = time.monotonic() + time_limit_s - min(_RESERVE_S, _RESERVE_SHARE * time_limit_s)
    ticks, tick_s, is_exact = in_ticks(problem)
    classes = priority_classes(ticks)
    # If ticks round, the schedule of lpt, which does not use ticks, may be better.
    unrounded = place(problem, list_reservations(problem, "lpt")) if len(classes) == 1 and not is_exact else None
    reservations: list[Reservation] = []
    bound_s, is_proven = makespan_bound(problem), True
    for number, demands in enumerate(classes):
        now = time.monotonic()
        share = now + (deadline - now) / (len(classes) - number)
        search = _Search(cp_model, replace(ticks, pending=demands), reservations, hint, gap)
        search.run(share)
        reservations += search.best
        is_proven = is_proven and search.is_proven
        if number == 0:
            # Later bounds hold only for the reservations fixed before, not for every schedule.
            slack = 0 if is_exact else len(demands) + 1
            bound_s = max(bound_s, (search.bound - slack) * tick_s)
    placements = place(problem, reservations)
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
    """The search for reservations of one priority; ``best`` is the best result so far, ``bound`` the lower bound."""

    def __init__(
        self,
        cp_model: ModuleType,
        problem: SchedulingProblem,
        taken: Sequence[Reservation],
        hint: Schedule | None,
        gap: float,
    ) -> None:
        self._cp = cp_model
        self._gap = gap
        self._problem = problem
        self._taken = list(taken)
        self._floor = max((reservation.end for reservation in taken), default=0.0)
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
        self.best = min((self._reservations_in(order) for order in orders), key=self._cost)

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
        """Return a sort key by hinted start; tasks that are not in the hint come last, the longest first."""
        start_s = self._hinted[demand.task].start_s if demand.task in self._hinted else math.inf
        return start_s, -demand.duration_s

    def _reservations_in(self, order: Sequence[TaskDemand]) -> list[Reservation]:
        return reservations_in_order(self._problem, order, taken=self._taken)

    def _makespan(self, reservations: Sequence[Reservation]) -> float:
        return max((reservation.end for reservation in reservations), default=self._floor)

    def _cost(self, reservations: Sequence[Reservation]) -> tuple[float, float]:
        return max(self._makespan(reservations), self._floor), sum(reservation.end for reservation in reservations)

    def _keep(self, reservations: Sequence[Reservation]) -> bool:
        if not reservations or self._cost(reservations) >= self._cost(self.best):
            return False
        self.best = list(reservations)
        return True

    def _solve_whole(self, deadline: float) -> None:
        if self._nodes_are_apart() and len(self._problem.nodes) > 1:
            now = time.monotonic()
            self._balance(now + 0.7 * (deadline - now))
        # Good schedules may put wide tasks between narrow ones; trying other orders finds them sooner than a solver.
        now = time.monotonic()
        self._try_orders(now + 0.1 * (deadline - now), times=_TRIED_SEATS // len(self._problem.pending))
        if self._is_too_long():
            model = CpModel(self._cp, self._problem, self._taken, self._makespan(self.best))
            now = time.monotonic()
            solved = model.least_makespan(
                self.best, at_least=self.bound, deadline=now + 0.7 * (deadline - now), gap=self._gap
            )
            self._keep(solved.reservations)
            self.bound = max(self.bound, solved.bound)
        makespan = max(self._makespan(self.best), self._floor)
        model = CpModel(self._cp, self._problem, self._taken, makespan)
        if self._gap:
            now = time.monotonic()
            deadline = now + _FINISH_SHARE * (deadline - now)
        self._keep(model.least_completions(self.best, makespan=makespan, deadline=deadline, gap=self._gap).reservations)

    def _nodes_are_apart(self) -> bool:
        """Return whether only the GPUs of its own node can delay a task."""
        return not self._taken and not any(
            demand.release_s or demand.tenant in self._problem.quotas or len(reservation.counts) > 1
            for reservation in self.best
            for demand in (reservation.demand,)
        )

    def _balance(self, deadline: float) -> None:
        # Try the nodes of the earlier schedule first, stacked without a search.
        on_hinted = [replace(reservation, counts=self._hinted_counts(reservation)) for reservation in self.best]
        self._keep(balanced_reservations(self._problem, on_hinted, bound=math.inf, deadline=deadline))
        self._keep(balanced_reservations(self._problem, self.best, bound=self.bound, deadline=deadline))

    def _hinted_counts(self, reservation: Reservation) -> Mapping[str, int]:
        """Return the node of a task in the hint if it used only one and the task still fits there, else
        ``reservation``'s nodes."""
        placement = self._hinted.get(reservation.demand.task)
        names = {gpu.node for gpu in placement.gpus} if placement is not None else set()
        for name in names:
            if len(names) == 1 and len(self._problem.gpus_by_node.get(name, ())) >= reservation.demand.num_gpus:
                return {name: reservation.demand.num_gpus}
        return reservation.counts

    def _part(self, names: Sequence[str]) -> tuple[SchedulingProblem, list[Reservation]]:
        inside = [reservation for reservation in self.best if set(reservation.counts) <= set(names)]
        problem = replace(
            self._problem,
            nodes=tuple(node for node in self._problem.nodes if node.name in names),
            pending=tuple(reservation.demand for reservation in inside),
        )
        return problem, inside

    def _replace(self, names: Sequence[str], reservations: Sequence[Reservation]) -> None:
        self.best = [reservation for reservation in self.best if not set(reservation.counts) <= set(names)] + list(
            reservations
        )

    def _finish_nodes_sooner(self, deadline: float) -> None:
        """Minimize the sum of completion times node by node, keeping the makespan."""
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
                if solved.reservations and sum(reservation.end for reservation in solved.reservations) < sum(
                    reservation.end for reservation in inside
                ):
                    self._replace([name], solved.reservations)

    def _is_too_long(self) -> bool:
        return self._makespan(self.best) > self.bound * (1.0 + self._gap)

    def _try_orders(self, deadline: float, *, times: int) -> None:
        """Move tasks to other places in the order of a list schedule, for a number of tries, and keep improvements."""
        generator = random.Random(0)
        order = sorted(self.best, key=lambda reservation: reservation.start)
        demands = [reservation.demand for reservation in order]
        for _ in range(times):
            if time.monotonic() >= deadline or not self._is_too_long():
                return
            tried = list(demands)
            for _ in range(generator.randint(1, 4)):
                tried.insert(generator.randrange(len(tried)), tried.pop(generator.randrange(len(tried))))
            if self._keep(self._reservations_in(tried)):
                demands = tried
