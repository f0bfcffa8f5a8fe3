"""Suggests configurations with Optuna's tree-structured Parzen estimator (TPE)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alto.errors import UnsupportedError
from alto.spec import Axis, Sampled, SearchSpace
from alto.version import install_command


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One configuration and its progress.

    Attributes:
        values: Its point in the search space: values by canonical name, spelled as in the space.
        losses: Its value at every rung that it has reached, at exactly equal shares of the steps; lower is better.
        final: Its best value once it has done all its steps; None before.
    """

    values: Mapping[str, Any]
    losses: tuple[float, ...] = ()
    final: float | None = None
    has_ended: bool = False
    is_infeasible: bool = False


_TRIES = 8
"""Number of suggestions in a row that were already tried, after which a configuration is drawn at random."""


def check_installed() -> None:
    """Check that Optuna can be imported."""
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "search.algorithm 'tpe': expected Optuna, found that it is not installed; install it with: "
            f"{install_command('search')}, or set search.algorithm to random"
        ) from error


def next_configuration(space: SearchSpace, trials: Sequence[Trial], seed: int) -> dict[str, Any] | None:
    """Return the configuration in ``space`` to try next; None if all were tried.

    The result depends only on the arguments: the estimator is built again from all trials, and its random state comes
    from ``seed`` and their number. A trial that ended early counts with its values at the rungs that it has reached:
    the better of two trials is the one that reached a later rung, or has the lower value at the same rung. A trial that
    is still training and has reached no rung counts as a bad one, so that suggestions keep a distance from it. A trial
    that does not fit into memory violates a constraint.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {_name(index): _distribution(group) for index, group in enumerate(space.groups)}
    tried = {tuple(trial.values.items()) for trial in trials}
    known = [_optuna_trial(trial, space, distributions, seed) for trial in trials]
    for attempt in range(_TRIES):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(
                seed=(seed + 1_000_003 * len(trials) + 7919 * attempt) % 2**32,
                n_startup_trials=0,
                multivariate=True,
                constant_liar=True,
            )
        study = optuna.create_study(sampler=sampler)
        study.add_trials(known)
        suggested = study.ask(distributions)
        values = _values(space, suggested.params, seed)
        if tuple(values.items()) not in tried:
            return values
    drawn = space.sample(min(len(tried) + 1, space.num_distinct), seed)
    return next((values for values in drawn if tuple(values.items()) not in tried), None)


def _name(index: int) -> str:
    """Return the name of Optuna's parameter for the group of the space at this position."""
    return f"group-{index}"


def _distribution(group: tuple[Axis, ...]) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    axis = group[0]
    if len(group) == 1 and isinstance(axis.values, Sampled):
        given = axis.values
        if given.is_integer:
            return IntDistribution(int(given.min), int(given.max), log=given.log)
        return FloatDistribution(given.min, given.max, log=given.log)
    if len(group) == 1 and _is_ordered(axis):
        return IntDistribution(0, len(axis) - 1)
    return CategoricalDistribution(tuple(range(len(axis))))


def _is_ordered(axis: Axis) -> bool:
    """Return whether neighboring values of the list are similar: numbers that rise or fall."""
    values = axis.draw(0)
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return len(numbers) == len(values) and numbers in (sorted(numbers), sorted(numbers, reverse=True))


def _values(space: SearchSpace, params: Mapping[str, Any], seed: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for index, group in enumerate(space.groups):
        found = params[_name(index)]
        for axis in group:
            is_range = len(group) == 1 and isinstance(axis.values, Sampled)
            values[axis.key] = found if is_range else axis.draw(seed)[found]
    return values


def _optuna_trial(trial: Trial, space: SearchSpace, distributions: Mapping[str, Any], seed: int) -> Any:
    import optuna
    from optuna.trial import TrialState

    state, value = TrialState.RUNNING, None
    if trial.final is not None and math.isfinite(trial.final):
        state, value = TrialState.COMPLETE, trial.final
    elif trial.losses or trial.has_ended:
        state = TrialState.PRUNED
    return optuna.trial.create_trial(
        state=state,
        value=value,
        params=_params(trial.values, space, seed),
        distributions=dict(distributions),
        intermediate_values=dict(enumerate(trial.losses)),
        constraints={"memory": 1.0 if trial.is_infeasible else 0.0},
    )


def _params(values: Mapping[str, Any], space: SearchSpace, seed: int) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for index, group in enumerate(space.groups):
        axis = group[0]
        value = values[axis.key]
        if len(group) == 1 and isinstance(axis.values, Sampled):
            params[_name(index)] = value
        else:
            drawn = list(zip(*(one.draw(seed) for one in group), strict=True))
            params[_name(index)] = drawn.index(tuple(values[one.key] for one in group))
    return params
