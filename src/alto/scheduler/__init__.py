"""Decides who runs where, from plain numbers."""

from alto.scheduler.inter_task import TaskDemand, schedule_tasks
from alto.scheduler.intra_task import JobDemand, SeatingPlan, plan_residents

__all__ = ["JobDemand", "SeatingPlan", "TaskDemand", "plan_residents", "schedule_tasks"]
