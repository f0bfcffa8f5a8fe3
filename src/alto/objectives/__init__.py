"""From the losses of tokens to one loss per job."""

from alto.objectives.base import Objective, Terms
from alto.objectives.passes import job_losses, pass_terms, reference_log_probs, token_losses
from alto.objectives.registry import find_objective

__all__ = ["Objective", "Terms", "find_objective", "job_losses", "pass_terms", "reference_log_probs", "token_losses"]
