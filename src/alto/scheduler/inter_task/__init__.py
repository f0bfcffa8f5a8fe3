"""Which task runs on which GPUs, and when: ``P | size_j | C_max`` with nodes, releases, priorities and quotas. Pure."""

from alto.scheduler.inter_task.lists import LIST_METHODS, LIST_ORDERS
from alto.scheduler.inter_task.problem import RunningTask, SchedulingProblem, TaskDemand
from alto.scheduler.inter_task.reservations import fewest_nodes
from alto.scheduler.inter_task.schedule import METHODS, schedule_tasks
from alto.scheduler.inter_task.validate import check_schedule

__all__ = [
    "LIST_METHODS",
    "LIST_ORDERS",
    "METHODS",
    "RunningTask",
    "SchedulingProblem",
    "TaskDemand",
    "check_schedule",
    "fewest_nodes",
    "schedule_tasks",
]
