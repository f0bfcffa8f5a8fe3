"""Specifications: tasks, their search spaces and jobs, and their files. Nothing here imports torch."""

from alto.spec.base_model import BaseModelSpec, Quantisation
from alto.spec.early_exit import EarlyExit
from alto.spec.job_config import ALL_LINEAR, JobConfig
from alto.spec.load import build_task, load_task, parse_override, read_run_task
from alto.spec.module_names import PEFT_DEFAULT
from alto.spec.objectives import PREFERENCE_METRICS, PREFERENCE_SCORES, ObjectiveEntry, ObjectiveSettings
from alto.spec.rules import Rule
from alto.spec.scoring import Scoring, parse_metric
from alto.spec.search import Budget, Search
from alto.spec.search_space import MAX_JOBS, SearchSpace
from alto.spec.simulation import Simulation, load_simulation
from alto.spec.task import AdapterDtype, Job, MixtureSource, OnBadRow, RowFormName, Task, TrainOn
from alto.spec.trace import ArrivingTask

__all__ = [
    "ALL_LINEAR",
    "MAX_JOBS",
    "PEFT_DEFAULT",
    "PREFERENCE_METRICS",
    "PREFERENCE_SCORES",
    "AdapterDtype",
    "ArrivingTask",
    "BaseModelSpec",
    "Budget",
    "EarlyExit",
    "Job",
    "JobConfig",
    "MixtureSource",
    "ObjectiveEntry",
    "ObjectiveSettings",
    "OnBadRow",
    "Quantisation",
    "RowFormName",
    "Rule",
    "Scoring",
    "Search",
    "SearchSpace",
    "Simulation",
    "Task",
    "TrainOn",
    "build_task",
    "load_simulation",
    "load_task",
    "parse_metric",
    "parse_override",
    "read_run_task",
]
