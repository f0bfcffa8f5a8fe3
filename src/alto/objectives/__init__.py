"""From the losses of tokens to one loss per job."""

from alto.objectives.base import Objective, Terms
from alto.objectives.micro_batch import job_losses, micro_batch_terms, reference_log_probs, terms_of, token_losses
from alto.objectives.pairs import PREFERENCE_METRICS, PREFERENCE_SCORES, Pairs, check_pairs, preference_metrics
from alto.objectives.registry import check_rows, find_objective
from alto.objectives.sums import run_sums

__all__ = [
    "PREFERENCE_METRICS",
    "PREFERENCE_SCORES",
    "Objective",
    "Pairs",
    "Terms",
    "check_pairs",
    "check_rows",
    "find_objective",
    "job_losses",
    "micro_batch_terms",
    "preference_metrics",
    "reference_log_probs",
    "run_sums",
    "terms_of",
    "token_losses",
]
