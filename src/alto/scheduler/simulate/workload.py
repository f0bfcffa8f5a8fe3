"""The tasks of a simulation, drawn from its seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from alto.errors import SpecError
from alto.scheduler.simulate.run import percentile, simulate
from alto.spec import MAX_S, MIN_S, ArrivingTask, Simulation

_Z99 = 2.3263478740408408
"""99th percentile of the standard normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTask:
    """The true properties of a task, some of which the queue cannot observe.

    Attributes:
        name: Unique name, numbered in the order of arrival.
        task: The task as submitted.
        exit_share: Share of its work that it does with early exit.
        estimate_factor: Its first estimate divided by its true expected duration.
    """

    name: str
    task: ArrivingTask
    exit_share: float
    estimate_factor: float

    @property
    def step_share(self) -> float:
        """Share of its work that its steps take regardless of the tokens trained."""
        return self.task.step_share


def draw_tasks(simulation: Simulation) -> list[SimulatedTask]:
    """Draw the tasks of ``simulation`` in the order of arrival; the same for every method."""
    draw = random.Random(f"tasks {simulation.seed}")
    arriving = simulation.trace if simulation.trace is not None else _made_up(simulation, draw)
    spread = math.log(simulation.estimate_error)
    return [
        SimulatedTask(
            name=f"task-{number}",
            task=task,
            exit_share=draw.choice(simulation.early_exit_shares or (1.0,)),
            estimate_factor=math.exp(draw.uniform(-spread, spread)),
        )
        for number, task in enumerate(sorted(arriving, key=lambda task: task.arrival_s))
    ]


def _made_up(simulation: Simulation, draw: random.Random) -> list[ArrivingTask]:
    tasks, now_s = [], 0.0
    of_base = random.Random(f"bases {simulation.seed}")  # its own generator: tasks are the same with and without bases
    counts, shares = list(simulation.gpus), list(simulation.gpus.values())
    for _ in range(simulation.num_tasks):
        if simulation.arrivals_per_hour is not None:
            now_s += draw.expovariate(simulation.arrivals_per_hour / 3600)
        (count,) = draw.choices(counts, shares)
        duration_s = min(max(_duration_s(simulation, draw), MIN_S), MAX_S)  # the tail of a Pareto distribution is heavy
        base = f"base-{of_base.randrange(simulation.bases)}" if simulation.bases else ""
        tasks.append(
            ArrivingTask(
                arrival_s=now_s, gpus=count, duration_s=duration_s, base=base, step_share=simulation.step_share
            )
        )
    return tasks


def _duration_s(simulation: Simulation, draw: random.Random) -> float:
    median_s, ratio = simulation.duration_median_s, simulation.duration_p99_s / simulation.duration_median_s
    if simulation.duration_distribution == "lognormal":
        return median_s * math.exp(math.log(ratio) / _Z99 * draw.gauss(0, 1))
    # The Pareto index follows from the ratio of the 99th percentile to the median.
    index = math.log(50) / math.log(ratio)
    return median_s * 2 ** (-1 / index) * draw.paretovariate(index)


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
