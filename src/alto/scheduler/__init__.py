"""Decides who runs where, from plain numbers: seats, orders, and laws of memory and time."""

from alto.scheduler.estimate import JobWork, estimate_duration_s, expected_duration_s, remaining_duration_s
from alto.scheduler.fit import MemoryFit, ThroughputFit, fit_memory, fit_throughput, max_tokens, saturation
from alto.scheduler.inter_task import (
    LIST_METHODS,
    METHODS,
    RunningTask,
    SchedulingProblem,
    TaskDemand,
    check_schedule,
    schedule_tasks,
)
from alto.scheduler.intra_task import plan_residents
from alto.scheduler.packing import Packing, PackingRequest, choose_packing
from alto.scheduler.ranks import RankDemand, RankSlots, assign_ranks, imbalance
from alto.scheduler.seating import JobDemand, ParkReason, SeatingLimits, SeatingPlan, SeatReason
from alto.scheduler.tail import TailForecast, TailJob, forecast_tail

__all__ = [
    "LIST_METHODS",
    "METHODS",
    "JobDemand",
    "JobWork",
    "MemoryFit",
    "Packing",
    "PackingRequest",
    "ParkReason",
    "RankDemand",
    "RankSlots",
    "RunningTask",
    "SchedulingProblem",
    "SeatReason",
    "SeatingLimits",
    "SeatingPlan",
    "TailForecast",
    "TailJob",
    "TaskDemand",
    "ThroughputFit",
    "assign_ranks",
    "check_schedule",
    "choose_packing",
    "estimate_duration_s",
    "expected_duration_s",
    "fit_memory",
    "fit_throughput",
    "forecast_tail",
    "imbalance",
    "max_tokens",
    "plan_residents",
    "remaining_duration_s",
    "saturation",
    "schedule_tasks",
]
