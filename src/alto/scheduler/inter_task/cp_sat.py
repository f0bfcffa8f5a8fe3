"""Schedules by OR-tools' CP-SAT: exact for some dozens of tasks, parts of the cluster at a time for thousands."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from alto.errors import UnsupportedError
from alto.records import Schedule
from alto.scheduler.inter_task.bounds import makespan_bound
from alto.scheduler.inter_task.lists import (
    Reservation,
    Solved,
    fewest_nodes,
    list_reservations,
    place,
    priority_classes,
    reservations_in_order,
    running_counts,
)
from alto.scheduler.inter_task.problem import SchedulingProblem, TaskDemand, in_ticks, makespan_of, schedule_from
from alto.version import install_command

# Local search for clusters that are too large for one model: moves tasks between nodes until all nodes end at about the
# same time.

_TRIES = 30
"""Tries of one cooling, per task."""

_MAX_COOLINGS = 60
"""Consecutive coolings without improvement after which the search ends."""

_WARMTH = 0.001
"""Fraction of the makespan by which a try may be worse at the beginning of a cooling."""


def balanced_reservations(
    problem: SchedulingProblem, reservations: Sequence[Reservation], *, bound: float, deadline: float
) -> list[Reservation]:
    """Move and swap tasks between nodes so that the last node ends sooner, and return the new reservations.

    The tasks of one node are stacked backwards from its end: first the task with the most GPUs, then the others by
    decreasing number of GPUs; among equals, the longest first. Each takes the GPUs with the lowest stacks. If the
    numbers of GPUs divide each other, no GPU waits in between, and the node ends when its fullest GPU does.

    Moves and swaps are tried at random. One is kept if the later of its two nodes ends sooner than before, or only a
    little later. This tolerance shrinks to zero (annealing), and then starts over.

    Args:
        reservations: Reservations on one node each, without releases, quotas or tasks of a higher priority in the way.
        bound: The search stops once all tasks end by this time.
        deadline: When to stop at the latest, by ``time.monotonic``.
    """
    nodes = [_Stack(problem, node.name) for node in problem.nodes]
    for node in nodes:
        node.put(
            sorted(
                (reservation.demand for reservation in reservations if node.name in reservation.counts),
                key=_stack_order,
            )
        )
    generator = random.Random(0)
    num_tries = _TRIES * len(reservations)
    best, best_height, num_vain = [list(node.tasks) for node in nodes], _last_end(nodes), 0
    while best_height > bound and num_vain < _MAX_COOLINGS and time.monotonic() < deadline:
        num_vain += 1
        for number in range(num_tries):
            if not number % 16 and time.monotonic() >= deadline:
                break
            warmth = _WARMTH * best_height * (1 - number / num_tries)
            if _try(nodes, -warmth * math.log(1 - generator.random()), generator) and _last_end(nodes) < best_height:
                best, best_height, num_vain = [list(node.tasks) for node in nodes], _last_end(nodes), 0
                if best_height <= bound:
                    break
    for node, tasks in zip(nodes, best, strict=True):
        node.put(tasks)
    return [reservation for node in nodes for reservation in node.reservations()]


def _last_end(nodes: Iterable[_Stack]) -> float:
    return max(node.height for node in nodes)


def _stack_order(demand: TaskDemand) -> tuple[float, ...]:
    return -demand.num_gpus, -demand.duration_s


class _Stack:
    """One node and its tasks, stacked in reverse from the node's end back to the ends of its running tasks."""

    def __init__(self, problem: SchedulingProblem, name: str) -> None:
        (node,) = (node for node in problem.nodes if node.name == name)
        held = {gpu.index: task.remaining_s for task in problem.running for gpu in task.gpus if gpu.node == name}
        self.name = name
        self.free_at = sorted(held.get(index, 0.0) for index in node.gpus)
        self.tasks: list[TaskDemand] = []
        self.size = len(self.free_at)
        self.height = 0.0
        # GPU seconds in use; the height is never below area / size.
        self.area = 0.0

    def put(self, tasks: list[TaskDemand]) -> None:
        """Replace the node's tasks by ``tasks``, given in the order of stacking."""
        self.tasks, self.height = tasks, self.height_of(tasks)
        self.area = sum(self.free_at) + sum(demand.num_gpus * demand.duration_s for demand in tasks)

    def height_of(self, tasks: Iterable[TaskDemand]) -> float:
        """Return when the node ends with ``tasks``, given in the order of stacking."""
        columns = [(free_at, 0.0) for free_at in self.free_at]
        for demand in tasks:
            _stack(columns, demand)
        return columns[-1][0]

    def reservations(self) -> list[Reservation]:
        columns = [(free_at, 0.0) for free_at in self.free_at]
        ends = [(demand, _stack(columns, demand)) for demand in self.tasks]
        height = columns[-1][0]
        return [
            Reservation(demand=demand, start=height - end, counts={self.name: demand.num_gpus}) for demand, end in ends
        ]


def _stack(columns: list[tuple[float, float]], demand: TaskDemand) -> float:
    """Put a task on the lowest of the columns, which are ``(free_at + load, load)`` in increasing order; return its
    upper edge."""
    width = demand.num_gpus
    upper = max(load for _, load in columns[:width]) + demand.duration_s
    columns[:width] = [(total - load + upper, upper) for total, load in columns[:width]]
    columns.sort()
    return upper


def _try(nodes: Sequence[_Stack], slack: float, generator: random.Random) -> bool:
    """Swap two tasks of two nodes, or move one, if the later of the two nodes then ends at most ``slack`` later than
    now."""
    is_last = generator.random() < 0.2
    one = max(nodes, key=lambda node: node.height) if is_last else generator.choice(nodes)
    other = generator.choice(nodes)
    if one is other or not one.tasks:
        return False
    mine = generator.choice(one.tasks)
    theirs = generator.choice(other.tasks) if other.tasks and generator.random() < 0.7 else None
    if mine.num_gpus > other.size or (theirs is not None and theirs.num_gpus > one.size):
        return False
    return _exchange(one, mine, other, theirs, max(one.height, other.height) + slack)


def _exchange(one: _Stack, mine: TaskDemand, other: _Stack, theirs: TaskDemand | None, limit: float) -> bool:
    """Swap two tasks, or move one, if both nodes then end before ``limit``; return whether they do."""
    back = () if theirs is None else (theirs,)
    added_area = mine.num_gpus * mine.duration_s - sum(task.num_gpus * task.duration_s for task in back)
    if other.area + added_area >= other.size * limit or one.area - added_area >= one.size * limit:
        return False
    there = sorted([*(task for task in other.tasks if task is not theirs), mine], key=_stack_order)
    if other.height_of(there) >= limit:
        return False
    here = sorted([*(task for task in one.tasks if task is not mine), *back], key=_stack_order)
    if one.height_of(here) >= limit:
        return False
    one.put(here)
    other.put(there)
    return True


NUM_WORKERS = 1
"""A single search worker: several take ten times as long for a dozen tasks, and prove no more for a hundred."""


class CpModel:
    """Reservations for the waiting tasks of ``problem``, in integer ticks, in addition to ``taken`` and the running
    tasks.

    A task has an interval, and on every node that is large enough an optional interval with the same start. If it needs
    several nodes, the number of GPUs on each is also a variable. A tenant's quota is a cumulative constraint over the
    tenant's intervals.
    """

    def __init__(self, cp_model: Any, problem: SchedulingProblem, taken: Iterable[Reservation], horizon: float) -> None:
        self._cp = cp_model
        self._problem = problem
        self._model = cp_model.CpModel()
        self._horizon = int(horizon)
        self._sizes = {node.name: len(node.gpus) for node in problem.nodes}
        self._uses: dict[str, list[tuple[Any, Any]]] = {name: [] for name in self._sizes}
        self._tenant_uses: dict[str, list[tuple[Any, Any]]] = {tenant: [] for tenant in problem.quotas}
        self._taken = list(taken)
        self._starts: dict[str, Any] = {}
        self._counts: dict[str, dict[str, Any]] = {}
        self._presences: dict[str, dict[str, Any]] = {}
        self._alike = self._idle_nodes_alike()
        self._widest_first = sorted(
            problem.pending, key=lambda demand: (-demand.num_gpus * demand.duration_s, demand.task)
        )
        self._add_fixed()
        for demand in problem.pending:
            self._add(demand)
        self._break_symmetry()
        for name, uses in self._uses.items():
            self._model.add_cumulative([use for use, _ in uses], [count for _, count in uses], self._sizes[name])
        for tenant, uses in self._tenant_uses.items():
            self._model.add_cumulative([use for use, _ in uses], [count for _, count in uses], problem.quotas[tenant])
        self._makespan = self._model.new_int_var(0, self._horizon, "makespan")
        for demand in problem.pending:
            self._model.add(self._makespan >= self._starts[demand.task] + int(demand.duration_s))

    def least_makespan(self, hint: Sequence[Reservation], *, at_least: float, deadline: float, gap: float) -> Solved:
        """Find the reservations with the least makespan, proven to within ``gap``; a makespan below ``at_least`` is not
        looked for."""
        self._model.add(self._makespan >= int(at_least))
        self._model.minimize(self._makespan)
        return self._solve(hint, deadline, gap)

    def least_completions(self, hint: Sequence[Reservation], *, makespan: float, deadline: float, gap: float) -> Solved:
        """Find reservations that end by ``makespan`` with the least sum of ends, proven to within ``gap``."""
        self._model.add(self._makespan <= int(makespan))
        self._model.minimize(sum(self._starts.values()))
        return self._solve(hint, deadline, gap)

    def _add_fixed(self) -> None:
        held: dict[str, list[tuple[float, int]]] = {}
        for task in self._problem.running:
            for name, count in running_counts(self._problem, task.gpus).items():
                self._uses[name].append((self._fixed(0, task.remaining_s), count))
            held.setdefault(task.tenant, []).append((task.remaining_s, len(task.gpus)))
        for tenant, uses in self._tenant_uses.items():
            # A tenant may use more GPUs than its quota if the quota was lowered; then only the last tasks to end count.
            left = self._problem.quotas[tenant]
            for remaining, count in sorted(held.get(tenant, ()), reverse=True):
                uses.append((self._fixed(0, remaining), min(count, left)))
                left -= min(count, left)
        for reservation in self._taken:
            use = self._fixed(reservation.start, reservation.demand.duration_s)
            for name, count in reservation.counts.items():
                self._uses[name].append((use, count))
            if reservation.demand.tenant in self._tenant_uses:
                self._tenant_uses[reservation.demand.tenant].append((use, reservation.demand.num_gpus))

    def _fixed(self, start: float, duration: float) -> Any:
        return self._model.new_fixed_size_interval_var(int(start), int(duration), "")

    def _add(self, demand: TaskDemand) -> None:
        model, count, duration = self._model, demand.num_gpus, int(demand.duration_s)
        start = model.new_int_var(int(demand.release_s), self._horizon - duration, f"start {demand.task}")
        num_nodes = fewest_nodes(self._problem.nodes, count)
        names = [name for name, size in self._sizes.items() if num_nodes > 1 or size >= count]
        presences = {name: model.new_bool_var(f"{demand.task} on {name}") for name in names}
        if num_nodes == 1:
            counts: dict[str, Any] = dict.fromkeys(names, count)
            model.add_exactly_one(presences.values())
        else:
            counts = {name: model.new_int_var(0, self._sizes[name], f"{demand.task} GPUs on {name}") for name in names}
            for name in names:
                model.add(counts[name] <= self._sizes[name] * presences[name])
                model.add(counts[name] >= presences[name])
            model.add(sum(counts.values()) == count)
            model.add(sum(presences.values()) <= num_nodes)
        for name in names:
            use = model.new_optional_fixed_size_interval_var(start, duration, presences[name], "")
            self._uses[name].append((use, counts[name]))
        if demand.tenant in self._tenant_uses:
            whole = model.new_fixed_size_interval_var(start, duration, "")
            self._tenant_uses[demand.tenant].append((whole, count))
        self._starts[demand.task], self._presences[demand.task], self._counts[demand.task] = start, presences, counts

    def _break_symmetry(self) -> None:
        """Put the first task on the first of several equal idle nodes, the second on one of the first two, and so
        on."""
        for names in self._alike:
            for position, demand in enumerate(self._widest_first):
                for name in names[position + 1 :]:
                    if name in self._presences[demand.task]:
                        self._model.add(self._presences[demand.task][name] == 0)

    def _idle_nodes_alike(self) -> list[list[str]]:
        if any(fewest_nodes(self._problem.nodes, demand.num_gpus) > 1 for demand in self._problem.pending):
            return []
        busy = {gpu.node for task in self._problem.running for gpu in task.gpus}
        busy |= {name for reservation in self._taken for name in reservation.counts}
        alike: dict[int, list[str]] = {}
        for name, size in self._sizes.items():
            if name not in busy:
                alike.setdefault(size, []).append(name)
        return list(alike.values())

    def _add_hints(self, reservations: Sequence[Reservation]) -> None:
        by_task = {reservation.demand.task: reservation for reservation in reservations}
        renamed = {name: name for name in self._sizes}
        for names in self._alike:
            # The hint must satisfy the symmetry breaking too: the first task on the first node.
            used = [name for demand in self._widest_first for name in by_task[demand.task].counts if name in names]
            renamed |= dict(zip(dict.fromkeys((*used, *names)), names, strict=True))
        for task, reservation in by_task.items():
            self._model.add_hint(self._starts[task], int(reservation.start))
            counts = {renamed[name]: count for name, count in reservation.counts.items()}
            for name, presence in self._presences[task].items():
                self._model.add_hint(presence, name in counts)
                if not isinstance(self._counts[task][name], int):
                    self._model.add_hint(self._counts[task][name], counts.get(name, 0))

    def _solve(self, hint: Sequence[Reservation], deadline: float, gap: float) -> Solved:
        self._add_hints(hint)
        solver = self._cp.CpSolver()
        solver.parameters.max_time_in_seconds = max(0.0, deadline - time.monotonic())
        solver.parameters.relative_gap_limit = gap
        solver.parameters.random_seed = 0
        solver.parameters.num_workers = NUM_WORKERS
        status = solver.solve(self._model)
        if status not in (self._cp.OPTIMAL, self._cp.FEASIBLE):
            return Solved(reservations=(), bound=0.0, is_optimal=False)
        reservations = tuple(
            Reservation(
                demand=demand,
                start=float(solver.value(self._starts[demand.task])),
                counts={
                    name: int(solver.value(self._counts[demand.task][name]))
                    for name, presence in self._presences[demand.task].items()
                    if solver.value(presence)
                },
            )
            for demand in self._problem.pending
        )
        return Solved(
            reservations=reservations, bound=solver.best_objective_bound, is_optimal=status == self._cp.OPTIMAL
        )


_MAX_WHOLE = 500
"""Largest product of tasks and nodes that is solved in one model."""

_TRIED_SEATS = 6_000
"""Number of tasks placed in list schedules of other orders, before the solver runs; this takes a fraction of a
second."""

_FINISH_FRACTION = 0.1
"""Fraction of the remaining time for minimising the sum of completion times, if a gap is allowed."""

_RESERVE_S = 0.1
_RESERVE_FRACTION = 0.1
"""Time reserved after the solver, in seconds or as a fraction of a short limit: to read its answer and to number
GPUs."""


def cp_sat_schedule(
    problem: SchedulingProblem, *, time_limit_s: float, hint: Schedule | None, gap: float = 0.0
) -> Schedule:
    """Find the schedule with the least makespan, and among those the one with the least sum of completion times.

    Priorities are solved one after the other, the highest first; earlier ones are then fixed, and the makespan counts
    from their end. Times are integer ticks (see :func:`in_ticks`) until the schedule is found. If ticks round, the
    schedule may end up to one tick per task later than the best, and the bound is lowered accordingly.

    The same problem and hint with unlimited time give the same schedule. If the time limit stops the search, the result
    depends on the machine.

    Args:
        gap: See :func:`schedule_tasks`.

    Raises:
        UnsupportedError: OR-tools is not installed.
    """
    cp_model = _import_cp_model()
    deadline = time.monotonic() + time_limit_s - min(_RESERVE_S, _RESERVE_FRACTION * time_limit_s)
    ticks, tick_s, is_exact = in_ticks(problem)
    classes = priority_classes(ticks)
    # If ticks round, the schedule of lpt, which does not use ticks, may be better.
    unrounded = place(problem, list_reservations(problem, "lpt")) if len(classes) == 1 and not is_exact else None
    reservations: list[Reservation] = []
    bound_s, is_proven = makespan_bound(problem), True
    for number, demands in enumerate(classes):
        now = time.monotonic()
        share = now + (deadline - now) / (len(classes) - number)
        search = _ReservationSearch(cp_model, replace(ticks, pending=demands), reservations, hint, gap)
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
            f"method: cp-sat needs the package ortools, found none; {install_command('scheduler')}, or use method lpt"
        ) from error
    return cp_model


class _ReservationSearch:
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
        # Ends are integer ticks.
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
            deadline = now + _FINISH_FRACTION * (deadline - now)
        self._keep(model.least_completions(self.best, makespan=makespan, deadline=deadline, gap=self._gap).reservations)

    def _nodes_are_apart(self) -> bool:
        """Return whether only the GPUs of its own node can delay a task."""
        return not self._taken and not any(
            demand.release_s or demand.tenant in self._problem.quotas or len(reservation.counts) > 1
            for reservation in self.best
            for demand in (reservation.demand,)
        )

    def _balance(self, deadline: float) -> None:
        # First try the nodes of the previous schedule (bound=inf: no local search).
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
        """Minimise the sum of completion times node by node, keeping the makespan."""
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
