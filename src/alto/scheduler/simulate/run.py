"""One simulation: tasks and failures drawn from the seed, scheduled by one method; and the search for the smallest
cluster that is fast enough."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from alto.errors import SpecError
from alto.records import Gpu, Node, Placement, Schedule, SimulationOutcome
from alto.scheduler.inter_task import LIST_METHODS, SchedulingProblem, schedule_tasks
from alto.scheduler.queue import Queue, QueueSettings, TaskState
from alto.scheduler.simulate.workload import draw_tasks
from alto.scheduler.simulate.world import World
from alto.spec import Simulation

MAX_LISTED = 200
"""Number of waiting and running tasks above which a list method places only the tasks that start now; the same tasks
start."""

MAX_SOLVED = 100
"""Number of waiting and running tasks above which ``lpt`` replaces a solver."""

_LEAST_PLAN_S, _MOST_PLAN_S = 0.02, 1.0
"""Bounds of a solver's time limit for one plan; the upper bound is the same on a real cluster."""

_GAP = 0.01
"""Relative distance from the bound at which a solver stops searching, as on a real cluster."""


def nodes_of(simulation: Simulation) -> tuple[Node, ...]:
    """Return the nodes of the cluster of ``simulation``."""
    gpus = tuple(range(simulation.gpus_per_node))
    return tuple(Node(name=f"node-{number:04}", gpus=gpus) for number in range(simulation.nodes))


def simulate(
    simulation: Simulation,
    *,
    method: str,
    early_exit: bool,
    on_progress: Callable[[int, int], None] | None = None,
) -> SimulationOutcome:
    """Simulate ``method`` on the tasks of ``simulation``.

    A solver's result within its time limit depends on the machine; list methods are deterministic.

    Args:
        on_progress: Called regularly with the number of ended tasks and of all tasks.

    Raises:
        SpecError: The method is unknown, or a task asks for more GPUs than the cluster has or its tenant's quota
            allows.
    """
    name = method.lower()
    is_list = name in LIST_METHODS
    nodes = nodes_of(simulation)
    settings = QueueSettings(
        quotas=simulation.quotas,
        max_attempts=simulation.max_attempts,
        backoff_s=simulation.backoff_s,
        max_planned=MAX_LISTED if is_list else MAX_SOLVED,
        list_method=name if is_list else "lpt",
    )
    tasks = draw_tasks(simulation)
    solve = _Solver(name, simulation.solver_s, len(tasks))
    queue = Queue(nodes, settings, solve)
    world = World(simulation, queue, nodes, early_exit=early_exit)

    def observe(num_ended: int) -> None:
        solve.num_open = len(tasks) - num_ended
        if on_progress is not None:
            on_progress(num_ended, len(tasks))

    world.run(tasks, observe)
    first_s = tasks[0].task.arrival_s
    makespan_s = max(world.now_s - first_s, 0.0)
    finished = [task for task in queue.tasks.values() if task.state is TaskState.FINISHED]
    took_s = [(task.ended_s or 0.0) - task.submitted_s for task in finished]
    busy_s = sum(len(gpus) * (end_s - start_s) for gpus, start_s, end_s in _uses(world.attempts))
    return SimulationOutcome(
        method=name,
        early_exit=early_exit,
        label="B" + ("+S" if name != "fifo" else "") + ("+EE" if early_exit else ""),
        planner=" and ".join(sorted(world.planners)),
        makespan_s=makespan_s,
        mean_completion_s=sum(took_s) / len(took_s) if took_s else 0.0,
        p99_completion_s=percentile(took_s, 0.99),
        utilisation=busy_s / world.gpu_s(first_s) if busy_s else 0.0,
        num_replans=world.num_replans,
        num_attempts=len(world.attempts),
        num_finished=len(finished),
        num_failed=len(queue.tasks) - len(finished),
        planned=tuple(world.planned.values()),
        actual=tuple(world.attempts),
    )


def _uses(attempts: Iterable[Placement]) -> list[tuple[tuple[Gpu, ...], float, float]]:
    """Return GPUs, start and end of every executor; it holds its GPUs from the start of its first task to the end of
    its last."""
    uses: dict[str | int, tuple[tuple[Gpu, ...], float, float]] = {}
    for number, attempt in enumerate(attempts):
        _, start_s, end_s = uses.get(attempt.executor, (attempt.gpus, attempt.start_s, attempt.end_s))
        span = (attempt.gpus, min(start_s, attempt.start_s), max(end_s, attempt.end_s))
        uses[attempt.executor or number] = span
    return list(uses.values())


class _Solver:
    """Makes the plans of one simulation; a solver's time is shared by all plans, about one plan for each open task.

    Args:
        seconds: Solver time for all plans; each plan gets at least `_LEAST_PLAN_S`, even when this is used up.
    """

    def __init__(self, method: str, seconds: float, num_open: int) -> None:
        self._method = method
        self._left_s = seconds
        self.num_open = num_open

    def __call__(self, problem: SchedulingProblem, hint: Schedule | None) -> Schedule:
        limit_s = min(max(self._left_s / max(self.num_open, 1), _LEAST_PLAN_S), _MOST_PLAN_S)
        began_s = time.monotonic()
        schedule = schedule_tasks(problem, method=self._method, time_limit_s=limit_s, hint=hint, gap=_GAP)
        self._left_s -= time.monotonic() - began_s
        return schedule


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the smallest of ``values`` that at least ``fraction`` of them do not exceed; 0 if there are none."""
    return sorted(values)[math.ceil(fraction * len(values)) - 1] if values else 0.0


_PERCENTILE = 0.95
"""Fraction of the simulations of a cluster that must be fast enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The smallest cluster found.

    Attributes:
        makespan_s: 95th percentile over the simulations, in seconds.
        num_simulations: Simulations of each cluster that was tried.
    """

    nodes: int
    num_gpus: int
    makespan_s: float
    num_simulations: int


def smallest_cluster(
    simulation: Simulation,
    *,
    within_s: float,
    method: str,
    early_exit: bool,
    on_progress: Callable[[int, int, int], None] | None = None,
) -> Capacity:
    """Find by bisection the smallest number of nodes with which 95 % of the simulations end within ``within_s``
    seconds.

    Args:
        within_s: Largest allowed makespan in seconds.
        on_progress: Called with the number of nodes, its finished simulations, and all its simulations.

    Raises:
        SpecError: No number of nodes is enough, or the method is unknown.
    """

    def makespan_s(nodes: int) -> float:
        seeds = range(simulation.seed, simulation.seed + simulation.num_seeds)
        makespans_s: list[float] = []
        for seed in seeds:
            if on_progress is not None:
                on_progress(nodes, len(makespans_s), len(seeds))
            run = simulation.replace(nodes=nodes, seed=seed)
            makespans_s.append(simulate(run, method=method, early_exit=early_exit).makespan_s)
        return percentile(makespans_s, _PERCENTILE)

    nodes_of_tasks = [math.ceil(task.task.gpus / simulation.gpus_per_node) for task in draw_tasks(simulation)]
    least, most = max(nodes_of_tasks), sum(nodes_of_tasks)  # with the most, no task waits for another
    too_few, enough, found_s = least - 1, least, makespan_s(least)
    while found_s > within_s:
        too_few, before_s = enough, found_s
        if enough >= most:
            raise SpecError(
                f"expected all tasks to end within {within_s:.6g} s on some cluster, found {before_s:.6g} s on "
                f"{enough} nodes of {simulation.gpus_per_node} GPUs; allow more time"
            )
        enough = min(2 * enough, most)
        found_s = makespan_s(enough)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        middle_s = makespan_s(middle)
        if middle_s <= within_s:
            enough, found_s = middle, middle_s
        else:
            too_few = middle
    return Capacity(
        nodes=enough,
        num_gpus=enough * simulation.gpus_per_node,
        makespan_s=found_s,
        num_simulations=simulation.num_seeds,
    )
