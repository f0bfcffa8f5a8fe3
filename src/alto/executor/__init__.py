"""Runs one task on its device: the only room where things are done rather than decided."""

from alto.executor.executor import Executor
from alto.executor.job_run import JobRun, plan_jobs, resolve_rungs
from alto.executor.model_notes import model_notes
from alto.executor.ranks import Ranks
from alto.executor.recovery import ResumeState, check_base, check_precision, read_refusal, recover
from alto.executor.trainer import Trainer

__all__ = [
    "Executor",
    "JobRun",
    "Ranks",
    "ResumeState",
    "Trainer",
    "check_base",
    "check_precision",
    "model_notes",
    "plan_jobs",
    "read_refusal",
    "recover",
    "resolve_rungs",
]
