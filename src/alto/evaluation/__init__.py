"""What an adapter is worth on rows it was not trained on: held-out loss and exact match."""

from alto.evaluation.measure import BaseModel, OnProgress, measure
from alto.evaluation.metrics_file import add_evaluation
from alto.evaluation.settings import EvaluationSettings
from alto.evaluation.subject import Subject, find_subject

__all__ = [
    "BaseModel",
    "EvaluationSettings",
    "OnProgress",
    "Subject",
    "add_evaluation",
    "find_subject",
    "measure",
]
