"""Finds the tasks that start now: a small problem, whose size does not depend on the number of waiting and running
tasks."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from alto.records import Node, Schedule
from alto.scheduler.inter_task import SchedulingProblem, TaskDemand, fewest_nodes, schedule_tasks
from alto.scheduler.queue.waiting import Waiting

__all__ = ["schedule_of_now"]


def schedule_of_now(
    waiting: Waiting,
    *,
    method: str,
    nodes: Sequence[Node],
    free: tuple[Node, ...],
    quotas: Mapping[str, int],
    in_use: Counter[str],
    now_s: float,
) -> Schedule | None:
    """Return the tasks of the list schedule that start now. All waiting tasks must have the same priority.

    A list schedule is greedy: the tasks that start now depend only on the free GPUs, the quotas and the order of the
    tasks, not on later starts or ends. So only the free GPUs and the first tasks of each shape are considered.

    Args:
        waiting: Waiting tasks.
        method: List method.
        nodes: Nodes of the cluster.
        free: The free GPUs of ``nodes``.
        quotas: Most GPUs of each tenant at a time.
        in_use: GPUs that each tenant holds.
        now_s: Time on the queue's clock.

    Returns:
        The schedule without later starts; None if no task can start.
    """
    left = {tenant: max(0, quota - in_use[tenant]) for tenant, quota in quotas.items()}
    sizes = sorted((len(node.gpus) for node in free), reverse=True)
    fitting: dict[int, bool] = {}

    def can_start(demand: TaskDemand) -> bool:
        count = demand.num_gpus
        if count not in fitting:
            # A task spans as few nodes as it would in an idle cluster, not more nodes with a few free GPUs each.
            fitting[count] = sum(sizes[: fewest_nodes(nodes, count)]) >= count
        return fitting[count] and count <= left.get(demand.tenant, count)

    # A task that cannot start also blocks later tasks of its shape. No task shares an executor: with so many waiting
    # tasks every GPU is busy, and the first tasks alone do not show which tasks should share.
    pending = [
        task.demand if task.demand.sharing is None else replace(task.demand, sharing=None)
        for tasks in waiting.first(sum(sizes), now_s)
        for task in itertools.takewhile(lambda task: can_start(task.demand), tasks)
    ]
    if not pending:
        return None
    problem = SchedulingProblem(nodes=free, pending=tuple(pending), quotas={name: n for name, n in left.items() if n})
    plan = schedule_tasks(problem, method=method)
    placements = tuple(placement for placement in plan.placements if placement.start_s == 0)
    return replace(
        plan,
        placements=placements,
        status="heuristic",
        bound_s=0.0,
        notice=f"only the {len(placements)} tasks that start now, of {len(waiting)} waiting tasks",
    )
