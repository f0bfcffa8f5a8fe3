"""WHAT is asked: tasks, their search spaces and jobs, and the files they are written in. No torch here."""

from alto.spec.early_exit import EarlyExit
from alto.spec.job_config import ALL_LINEAR, JobConfig
from alto.spec.load import build_task, load_task, parse_override
from alto.spec.search_space import MAX_JOBS, SearchSpace
from alto.spec.task import AdapterDtype, Job, RowFormName, Task

__all__ = [
    "ALL_LINEAR",
    "MAX_JOBS",
    "AdapterDtype",
    "EarlyExit",
    "Job",
    "JobConfig",
    "RowFormName",
    "SearchSpace",
    "Task",
    "build_task",
    "load_task",
    "parse_override",
]
