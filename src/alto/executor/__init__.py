"""Runs one task on its device: the only room where things are done rather than decided."""

from alto.executor.executor import Executor
from alto.executor.job_run import JobRun, plan_jobs
from alto.executor.ranks import Ranks
from alto.executor.recovery import Past, read_refusal, recover
from alto.executor.trainer import Trainer

__all__ = [
    "Executor",
    "JobRun",
    "Past",
    "Ranks",
    "Trainer",
    "plan_jobs",
    "read_refusal",
    "recover",
]
