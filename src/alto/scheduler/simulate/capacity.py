"""The search for the smallest cluster that is fast enough."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from alto.errors import SpecError
from alto.scheduler.simulate.run import percentile, simulate
from alto.scheduler.simulate.workload import draw_tasks
from alto.spec import Simulation

_SHARE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The smallest cluster found.

    Attributes:
        nodes: Number of nodes.
        num_gpus: GPUs of all nodes.
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
    """Find by bisection the fewest nodes with which 95 % of the simulations end within ``within_s`` seconds.

    Args:
        simulation: Tasks and cluster.
        within_s: Largest allowed makespan in seconds.
        method: Scheduling method.
        early_exit: Whether tasks have early exit.
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
        return percentile(makespans_s, _SHARE)

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
