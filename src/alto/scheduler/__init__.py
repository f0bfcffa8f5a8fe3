"""Scheduling decisions from plain numbers: resident jobs, task schedules, models of memory and time."""

from alto.scheduler.estimate import (
    JobWork,
    LastJob,
    LastJobsForecast,
    estimate_duration_s,
    expected_duration_s,
    fitted_rungs,
    forecast_last_jobs,
)
from alto.scheduler.fair_shares import ReceivedShare, TokenShares, jain_index, slot_shares, task_weights
from alto.scheduler.fit import fit_memory, fit_throughput, max_tokens, saturated_pass, saturation
from alto.scheduler.inter_task import (
    LIST_METHODS,
    METHODS,
    RunningTask,
    SchedulingProblem,
    TaskDemand,
    check_schedule,
    colocated,
    finish_times_s,
    schedule_tasks,
)
from alto.scheduler.intra_task import AdmitReason, JobDemand, ParkReason, ResidentLimits, ResidentPlan, plan_residents
from alto.scheduler.packing import Packing, PackingRequest, choose_packing
from alto.scheduler.ranks import RankDemand, RankSlots, assign_ranks, imbalance

__all__ = [
    "LIST_METHODS",
    "METHODS",
    "AdmitReason",
    "JobDemand",
    "JobWork",
    "LastJob",
    "LastJobsForecast",
    "Packing",
    "PackingRequest",
    "ParkReason",
    "RankDemand",
    "RankSlots",
    "ReceivedShare",
    "ResidentLimits",
    "ResidentPlan",
    "RunningTask",
    "SchedulingProblem",
    "TaskDemand",
    "TokenShares",
    "assign_ranks",
    "check_schedule",
    "choose_packing",
    "colocated",
    "estimate_duration_s",
    "expected_duration_s",
    "finish_times_s",
    "fit_memory",
    "fit_throughput",
    "fitted_rungs",
    "forecast_last_jobs",
    "imbalance",
    "jain_index",
    "max_tokens",
    "plan_residents",
    "saturated_pass",
    "saturation",
    "schedule_tasks",
    "slot_shares",
    "task_weights",
]
