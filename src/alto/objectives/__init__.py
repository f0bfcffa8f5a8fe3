"""Objectives, which turn the losses of tokens into one loss per job."""

from alto.objectives.base import (
    AuxiliaryTerm,
    DerivedMetrics,
    Objective,
    ObjectiveImplementation,
    Terms,
    find_objective,
    run_sums,
)
from alto.objectives.micro_batch import (
    Heads,
    Learners,
    job_losses,
    micro_batch_terms,
    read_states,
    reference_sums,
    terms_of,
    token_losses,
)
from alto.objectives.pairs import Pairs, preference_metrics

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
    "reference_sums",
    "run_sums",
    "terms_of",
    "token_losses",
]
