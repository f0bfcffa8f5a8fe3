"""The scheduling problem as a CP-SAT model: intervals on nodes, and one cumulative constraint per node."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alto.scheduler.inter_task.problem import SchedulingProblem, TaskDemand
from alto.scheduler.inter_task.reservations import Reservation, fewest_nodes, running_counts

__all__ = ["CpModel", "Solved"]

NUM_WORKERS = 1
"""A single search worker: several take ten times as long for a dozen tasks, and prove no more for a hundred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The result of CP-SAT: ``reservations`` is empty if it found none, ``bound`` is the bound of its objective."""

    reservations: tuple[Reservation, ...]
    bound: float
    is_optimal: bool


class CpModel:
    """Reservations for the waiting tasks of ``problem``, in whole ticks, beside ``taken`` and the running tasks.

    A task has an interval, and on every node that may hold it an optional interval with the same start. If it needs
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
            # A tenant may hold more GPUs than its quota if the quota was lowered; then the last to end count.
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
                counts=self._counts_found(solver, demand.task),
            )
            for demand in self._problem.pending
        )
        return Solved(
            reservations=reservations, bound=solver.best_objective_bound, is_optimal=status == self._cp.OPTIMAL
        )

    def _counts_found(self, solver: Any, task: str) -> Mapping[str, int]:
        return {
            name: int(solver.value(self._counts[task][name]))
            for name, presence in self._presences[task].items()
            if solver.value(presence)
        }
