"""The tasks of a simulation, drawn from its seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from alto.records import Sharing
from alto.scheduler.inter_task import TaskDemand
from alto.spec import MAX_S, MIN_S, ArrivingTask, Simulation

_Z99 = 2.3263478740408408
"""99th percentile of the standard normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTask:
    """The true properties of a task. The queue cannot observe some of them.

    Attributes:
        name: Unique name, numbered in the order of arrival.
        exit_share: Share of its work that it does with early exit.
        estimate_factor: Its first estimate divided by its true expected duration.
    """

    name: str
    task: ArrivingTask
    exit_share: float
    estimate_factor: float

    def demand(self, expected_share: float) -> TaskDemand:
        """Return the task as the queue sees it. Memory is not simulated, so any tasks fit together.

        Args:
            expected_share: Average share of its work that a task does.
        """
        task = self.task
        duration_s = max(task.duration_s * expected_share * self.estimate_factor, MIN_S)
        sharing = None
        if task.base and task.gpus == 1:
            step_s = task.step_share * duration_s
            sharing = Sharing(base=task.base, step_s=step_s, num_slots=1, slot_bytes=0, pass_bytes=0, capacity_bytes=0)
        return TaskDemand(
            task=self.name,
            num_gpus=task.gpus,
            duration_s=duration_s,
            release_s=task.arrival_s,
            priority=task.priority,
            tenant=task.tenant,
            sharing=sharing,
        )


def draw_tasks(simulation: Simulation) -> list[SimulatedTask]:
    """Draw the tasks of ``simulation`` in the order of arrival; the same for every method."""
    draw = random.Random(f"tasks {simulation.seed}")
    arriving = simulation.trace if simulation.trace is not None else _drawn_tasks(simulation, draw)
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


def _drawn_tasks(simulation: Simulation, draw: random.Random) -> list[ArrivingTask]:
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
