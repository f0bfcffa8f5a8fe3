"""Schedules by the mixed-integer program of the ALTO paper, for up to a dozen tasks: a cross-check of CP-SAT."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
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
)
from alto.scheduler.inter_task.problem import SchedulingProblem, TaskDemand, makespan_of, schedule_from
from alto.version import install_command

_TOLERANCE = 1e-6
"""Tolerance of SCIP's constraints."""

_BUILD_FRACTION = 0.25
"""Fraction of the time limit for building a program; a program that takes longer would not be solved in the rest."""

_READ_FACTOR = 1.5
"""Time in which SCIP reads and simplifies a program without checking its limit, as a multiple of the build time."""

_Machine = tuple[str, str, int]
"""A GPU of a node, or one unit of a tenant's quota: ``node`` or ``tenant``, the name, and an index."""


def milp_schedule(problem: SchedulingProblem, *, time_limit_s: float) -> Schedule:
    """Find the least makespan with SCIP; priorities are solved highest first, and earlier results are fixed.

    The variables are a start for every task, for every task and GPU whether it runs there, and for every two tasks
    which one comes first. The order matters only for two tasks that share a GPU: ``start_j >= end_i - M (3 - before_ij
    - on_ig - on_jg)``. A task is on one node if any is large enough. A tenant's quota is modelled as extra GPUs: each
    task of the tenant uses one extra GPU for each real GPU.

    If the time limit passes before a schedule is found, the schedule of ``lpt`` is returned, with a notice. The time
    limit includes building the program, which has a constraint for each pair of tasks and each GPU.

    Raises:
        UnsupportedError: OR-tools is not installed.
    """
    pywraplp = _import_pywraplp()
    deadline = time.monotonic() + time_limit_s
    classes = priority_classes(problem)
    reservations: list[Reservation] = []
    notice = ""
    bound_s, is_proven = makespan_bound(problem), len(classes) <= 1
    for number, demands in enumerate(classes):
        now = time.monotonic()
        taken = [reservation.demand for reservation in reservations]
        share_s = (deadline - now) / (len(classes) - number)
        try:
            model = _Model(
                pywraplp,
                replace(problem, pending=(*taken, *demands)),
                reservations,
                build_by=now + _BUILD_FRACTION * share_s,
            )
            solution = model.solve(now + share_s - _READ_FACTOR * (time.monotonic() - now))
        except _OutOfTimeError:
            solution = None
        if solution is None:
            reservations, is_proven = list_reservations(problem, "lpt"), False
            notice = f"scheduled by lpt: {len(taken) + len(demands)} tasks were too many for milp in {time_limit_s:g} s"
            break
        reservations = list(solution.reservations)
        is_proven = is_proven and solution.is_optimal
        if number == 0:
            bound_s = max(bound_s, solution.bound)
    placements = place(problem, reservations)
    if len(classes) == 1:
        placements = min(placements, place(problem, list_reservations(problem, "lpt")), key=makespan_of)
    schedule = schedule_from("milp", placements, bound_s=bound_s, status="optimal" if is_proven else "feasible")
    return replace(schedule, notice=notice)


def _import_pywraplp() -> ModuleType:
    try:
        from ortools.linear_solver import pywraplp
    except ImportError as error:
        raise UnsupportedError(
            f"method: milp needs the package ortools, found none; {install_command('scheduler')}, or use method lpt"
        ) from error
    module: ModuleType = pywraplp
    return module


class _OutOfTimeError(Exception):
    """Raised when the time limit passes before SCIP can start."""


class _Model:
    """The mixed-integer program for all tasks of ``problem``; the reservations in ``taken`` are fixed.

    Times are fractions of the horizon, so the paper's ``M`` is 1.

    Args:
        build_by: Deadline for building the program, by ``time.monotonic``.

    Raises:
        _OutOfTimeError: The program was not built in time.
    """

    def __init__(
        self, pywraplp: ModuleType, problem: SchedulingProblem, taken: Sequence[Reservation], *, build_by: float
    ) -> None:
        self._lp = pywraplp
        self._problem = problem
        self._nodes = [node for node in problem.nodes if node.gpus]
        self._solver = pywraplp.Solver.CreateSolver("SCIP")
        held = max((task.remaining_s for task in problem.running), default=0.0)
        released = max((demand.release_s for demand in problem.pending), default=0.0)
        self._horizon = max(held, released) + sum(demand.duration_s for demand in problem.pending)
        self._makespan = self._solver.NumVar(0.0, 1.0, "makespan")
        self._starts: dict[str, Any] = {}
        self._on: dict[str, dict[_Machine, Any]] = {}
        for demand in problem.pending:
            _check_time(build_by)
            self._add(demand)
        for first, second in itertools.combinations(problem.pending, 2):
            _check_time(build_by)
            self._keep_apart(first, second)
        self._wait_for_running()
        for reservation in taken:
            self._fix(reservation)

    def solve(self, deadline: float) -> Solved | None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise _OutOfTimeError
        self._solver.Minimize(self._makespan)
        self._solver.SetTimeLimit(max(1, int(1000 * left_s)))
        status = self._solver.Solve()
        if status not in (self._lp.Solver.OPTIMAL, self._lp.Solver.FEASIBLE):
            return None
        return Solved(
            reservations=tuple(self._reservation(demand) for demand in self._problem.pending),
            bound=self._solver.Objective().BestBound() * self._horizon * (1 - _TOLERANCE),
            is_optimal=status == self._lp.Solver.OPTIMAL,
        )

    def _add(self, demand: TaskDemand) -> None:
        solver, task = self._solver, demand.task
        start = solver.NumVar(demand.release_s / self._horizon, 1.0, f"start {task}")
        self._starts[task] = start
        solver.Add(self._makespan >= start + demand.duration_s / self._horizon)
        on = {
            ("node", node.name, index): solver.BoolVar(f"{task} on GPU {index} of {node.name}")
            for node in self._nodes
            for index in node.gpus
        }
        solver.Add(sum(on.values()) == demand.num_gpus)
        inside = []
        for node in self._nodes:
            here = solver.BoolVar(f"{task} on {node.name}")
            solver.Add(sum(on["node", node.name, index] for index in node.gpus) <= len(node.gpus) * here)
            inside.append(here)
        solver.Add(sum(inside) <= fewest_nodes(self._problem.nodes, demand.num_gpus))
        quota = self._problem.quotas.get(demand.tenant)
        if quota is not None:
            share = {
                ("tenant", demand.tenant, index): solver.BoolVar(f"{task} on share {index} of its tenant")
                for index in range(quota)
            }
            solver.Add(sum(share.values()) == demand.num_gpus)
            on |= share
        self._on[task] = on

    def _keep_apart(self, first: TaskDemand, second: TaskDemand) -> None:
        solver = self._solver
        is_before = solver.BoolVar(f"{first.task} before {second.task}")
        gaps = [
            (self._starts[second.task] - self._starts[first.task] - first.duration_s / self._horizon, is_before),
            (self._starts[first.task] - self._starts[second.task] - second.duration_s / self._horizon, 1 - is_before),
        ]
        on_first, on_second = self._on[first.task], self._on[second.task]
        for machine in on_first.keys() & on_second.keys():
            for gap, binds in gaps:
                solver.Add(gap >= binds + on_first[machine] + on_second[machine] - 3)

    def _wait_for_running(self) -> None:
        shares = {tenant: [0.0] * quota for tenant, quota in self._problem.quotas.items()}
        held: list[tuple[_Machine, float]] = []
        for task in sorted(self._problem.running, key=lambda task: -task.remaining_s):
            held += [(("node", gpu.node, gpu.index), task.remaining_s) for gpu in task.gpus]
            # A tenant may use more GPUs than its quota if the quota was lowered; then only the last tasks to end count.
            for index in [index for index, end in enumerate(shares.get(task.tenant, ())) if not end][: len(task.gpus)]:
                shares[task.tenant][index] = task.remaining_s
                held.append((("tenant", task.tenant, index), task.remaining_s))
        for machine, end_s in held:
            for name, on in self._on.items():
                if machine in on:
                    self._solver.Add(self._starts[name] >= end_s / self._horizon * on[machine])

    def _fix(self, reservation: Reservation) -> None:
        task = reservation.demand.task
        self._solver.Add(self._starts[task] == reservation.start / self._horizon)
        for node in self._nodes:
            here = sum(self._on[task]["node", node.name, index] for index in node.gpus)
            self._solver.Add(here == reservation.counts.get(node.name, 0))

    def _reservation(self, demand: TaskDemand) -> Reservation:
        counts: dict[str, int] = {}
        for (kind, name, _), on in self._on[demand.task].items():
            if kind == "node" and on.solution_value() > 0.5:
                counts[name] = counts.get(name, 0) + 1
        start = self._starts[demand.task].solution_value() * self._horizon
        return Reservation(demand=demand, start=start, counts=counts)


def _check_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise _OutOfTimeError
