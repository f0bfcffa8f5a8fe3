"""Objectives, which turn the losses of tokens into one loss per job."""

from alto.objectives.base import AuxiliaryTerm, DerivedMetrics, Objective, ObjectiveImplementation, Terms, run_sums
from alto.objectives.micro_batch import (
    Heads,
    Learners,
    job_losses,
    micro_batch_terms,
    read_states,
    reference_log_probs,
    reference_sums,
    terms_of,
    token_losses,
)
from alto.objectives.pairs import Pairs, preference_metrics
from alto.objectives.registry import find_objective

__all__ = [
    "AuxiliaryTerm",
    "DerivedMetrics",
    "Heads",
    "Learners",
    "Objective",
    "ObjectiveImplementation",
    "Pairs",
    "Terms",
    "find_objective",
    "job_losses",
    "micro_batch_terms",
    "preference_metrics",
    "read_states",
    "reference_log_probs",
    "reference_sums",
    "run_sums",
    "terms_of",
    "token_losses",
]
