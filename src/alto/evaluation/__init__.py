"""Evaluation of adapters on held-out rows: loss, exact match, preference, sample generations."""

from alto.evaluation.finalists import FinalistJudge, usable_rows
from alto.evaluation.measure import OnProgress, measure
from alto.evaluation.metrics_file import add_evaluation, check_metrics
from alto.evaluation.peft_check import PeftCheck
from alto.evaluation.samples import Sampler
from alto.evaluation.settings import EvaluationSettings
from alto.evaluation.target import adapter_folder, best_of_jobs, chat_template_beside, find_target

__all__ = [
    "EvaluationSettings",
    "FinalistJudge",
    "OnProgress",
    "PeftCheck",
    "Sampler",
    "adapter_folder",
    "add_evaluation",
    "best_of_jobs",
    "chat_template_beside",
    "check_metrics",
    "find_target",
    "measure",
    "usable_rows",
]
