"""Evaluation of adapters on held-out rows: loss, exact match, preference, sample generations."""

from alto.evaluation.finalists import FinalistJudge, usable_rows
from alto.evaluation.generate import Adapters, Sampling, Text, budget_of, max_positions, uniform_numbers, write
from alto.evaluation.measure import OnProgress, measure
from alto.evaluation.metrics_file import add_evaluation, check_metrics
from alto.evaluation.peft_check import PeftCheck
from alto.evaluation.rewards import Completion, Rewards
from alto.evaluation.samples import Sampler
from alto.evaluation.scorers import Answer, ScorerFailedError
from alto.evaluation.scoring import fitting_scorer
from alto.evaluation.settings import EvaluationSettings
from alto.evaluation.target import EvaluationTarget, adapter_folder, best_of_jobs, chat_template_beside, find_target

__all__ = [
    "Adapters",
    "Answer",
    "Completion",
    "EvaluationSettings",
    "EvaluationTarget",
    "FinalistJudge",
    "OnProgress",
    "PeftCheck",
    "Rewards",
    "Sampler",
    "Sampling",
    "ScorerFailedError",
    "Text",
    "adapter_folder",
    "add_evaluation",
    "best_of_jobs",
    "budget_of",
    "chat_template_beside",
    "check_metrics",
    "find_target",
    "fitting_scorer",
    "max_positions",
    "measure",
    "uniform_numbers",
    "usable_rows",
    "write",
]
