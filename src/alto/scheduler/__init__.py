"""Decides who runs where, from plain numbers: seats, orders, and laws of memory and time."""

from alto.scheduler.estimate import JobWork, estimate_duration_s, expected_duration_s
from alto.scheduler.fit import MemoryFit, ThroughputFit, fit_memory, fit_throughput, max_tokens, saturation
from alto.scheduler.inter_task import TaskDemand, schedule_tasks
from alto.scheduler.intra_task import JobDemand, ParkReason, SeatingLimits, SeatingPlan, SeatReason, plan_residents
from alto.scheduler.packing import Packing, PackingRequest, choose_packing

__all__ = [
    "JobDemand",
    "JobWork",
    "MemoryFit",
    "Packing",
    "PackingRequest",
    "ParkReason",
    "SeatReason",
    "SeatingLimits",
    "SeatingPlan",
    "TaskDemand",
    "ThroughputFit",
    "choose_packing",
    "estimate_duration_s",
    "expected_duration_s",
    "fit_memory",
    "fit_throughput",
    "max_tokens",
    "plan_residents",
    "saturation",
    "schedule_tasks",
]
