"""Objectives by the name of their method: those of ALTO, and those that installed packages bring."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points

from alto.data import EncodedDataset
from alto.errors import DataError, UnsupportedError
from alto.objectives.base import Objective
from alto.objectives.dpo import Dpo
from alto.objectives.orpo import Orpo
from alto.objectives.sft import Sft
from alto.spec import JobConfig
from alto.spec.method import ENTRY_POINT_GROUP

__all__ = ["check_rows", "find_objective"]

_OWN: dict[str, Objective] = {"sft": Sft(), "dpo": Dpo(), "orpo": Orpo()}
_MEMBERS = ("metrics", "scores", "needs_reference", "check", "terms")


def find_objective(method: str) -> Objective:
    """The objective of a task's ``method``.

    Raises:
        UnsupportedError: No installed package brings it, or several do, or what is brought cannot be loaded or is no
            objective.
    """
    if method in _OWN:
        return _OWN[method]
    found = entry_points(group=ENTRY_POINT_GROUP, name=method)
    if not found:
        raise UnsupportedError(
            f"method: expected one of {', '.join(_OWN)} or one that an installed package registers, found {method!r}; "
            "install that package here"
        )
    if len(found) > 1:
        values = ", ".join(sorted(entry.value for entry in found))
        raise UnsupportedError(
            f"method: expected one installed package that registers {method!r}, found {len(found)} ({values}); remove "
            "all but one"
        )
    (entry,) = found
    try:
        objective = entry.load()()
    except Exception as error:
        raise UnsupportedError(
            f"method: expected {entry.value} of the package that registers {method!r}, found that it cannot be loaded "
            f"({error}); repair or remove that package"
        ) from error
    if not isinstance(objective, Objective):
        missing = sorted(name for name in _MEMBERS if not hasattr(objective, name))
        raise UnsupportedError(
            f"method: expected {entry.value}, which is registered for {method!r}, to be an objective, found it without "
            f"{', '.join(missing)}; give it what docs/objectives.md lists"
        )
    if "loss" in objective.metrics or not set(objective.scores) <= set(objective.metrics):
        raise UnsupportedError(
            f"method: expected {entry.value}, which is registered for {method!r}, to measure its scores, "
            f"found metrics {objective.metrics} and scores {objective.scores}; name every score among the metrics, and "
            "none of them 'loss'"
        )
    return objective


def check_rows(objective: Objective, dataset: EncodedDataset, configs: Sequence[JobConfig]) -> None:
    """Make sure that ``objective`` can learn from such rows with such settings.

    Raises:
        DataError: The rows are no pairs, or are pairs.
        SpecError: A setting is out of its domain.
    """
    if objective.needs_reference and not dataset.is_paired:
        raise DataError(
            f"{type(objective).__name__} asks the base about the two replies of a pair: expected preference pairs, "
            "found rows with one reply; name a dataset of pairs"
        )
    objective.check(dataset, configs)
