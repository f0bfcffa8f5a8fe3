"""Finds the tasks that start now: a small problem, independent of how many tasks wait and run."""

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
    """The tasks that start now in the list schedule of all that wait, none of which goes before another by priority.

    A list schedule is greedy: the tasks that start now depend only on the free GPUs and quotas and on the order of the
        tasks, not on later starts or ends. So only those GPUs and the first tasks of each shape are considered.

    Args:
        waiting: Tasks that wait.
        method: List method.
        nodes: Nodes of the cluster.
        free: The free GPUs of ``nodes``.
        quotas: The most GPUs of a tenant at a time.
        in_use: GPUs that each tenant has.
        now_s: Time on the queue's clock.

    Returns:
        The schedule without what starts later; None where no task can start.
    """
    left = {tenant: max(0, quota - in_use[tenant]) for tenant, quota in quotas.items()}
    sizes = sorted((len(node.gpus) for node in free), reverse=True)
    fitting: dict[int, bool] = {}

    def can_start(demand: TaskDemand) -> bool:
        count = demand.num_gpus
        if count not in fitting:
            # On as few nodes as in the whole cluster, not on more nodes with a few free GPUs each.
            fitting[count] = sum(sizes[: fewest_nodes(nodes, count)]) >= count
        return fitting[count] and count <= left.get(demand.tenant, count)

    # A task that cannot start keeps later ones of its shape from starting, too. None shares: where so many tasks wait,
    # every GPU has one, and who should share cannot be seen from the first tasks alone.
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
        notice=f"of {len(waiting)} tasks that wait, the {len(placements)} that start now",
    )
