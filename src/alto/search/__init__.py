"""Decides which configurations a task tries next, from the losses of earlier jobs. Pure; no torch.

Data flow: :func:`next_configuration` gets the :class:`Trial` of every job and suggests the values of a new one
(tree-structured Parzen estimator of Optuna). :func:`forks_of` decides which jobs of a population continue as copies of
better jobs, and with which settings (population-based training). :func:`beyond_budget` decides which jobs end so that
the leading job can be trained to its end within the budget.
"""

from alto.search.budget import Need, TimeSpent, beyond_budget
from alto.search.population import forks_of, population_rungs
from alto.search.tpe import Trial, check_installed, next_configuration

__all__ = [
    "Need",
    "TimeSpent",
    "Trial",
    "beyond_budget",
    "check_installed",
    "forks_of",
    "next_configuration",
    "population_rungs",
]
