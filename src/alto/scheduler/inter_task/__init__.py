"""Decides which task runs on which GPUs, and when. Pure.

The problem is ``P | size_j | C_max`` with nodes, releases, priorities, quotas, and tasks that share executors.
"""

from alto.scheduler.inter_task.colocation import (
    Member,
    alone_rates,
    finish_times_s,
    member_of,
    members_ending_at,
)
from alto.scheduler.inter_task.lists import LIST_METHODS, LIST_ORDERS, fewest_nodes
from alto.scheduler.inter_task.problem import RunningTask, SchedulingProblem, TaskDemand
from alto.scheduler.inter_task.schedule import METHODS, schedule_tasks
from alto.scheduler.inter_task.sharing import colocated
from alto.scheduler.inter_task.validate import check_schedule

__all__ = [
    "LIST_METHODS",
    "LIST_ORDERS",
    "METHODS",
    "Member",
    "RunningTask",
    "SchedulingProblem",
    "TaskDemand",
    "alone_rates",
    "check_schedule",
    "colocated",
    "fewest_nodes",
    "finish_times_s",
    "member_of",
    "members_ending_at",
    "schedule_tasks",
]
