"""Objectives by the name of their method: those of ALTO, and those that installed packages bring."""

from __future__ import annotations

from importlib.metadata import entry_points

from alto.errors import UnsupportedError
from alto.objectives.base import Objective
from alto.objectives.dpo import Dpo
from alto.objectives.orpo import Orpo
from alto.objectives.sft import Sft
from alto.spec.method import ENTRY_POINT_GROUP

__all__ = ["find_objective"]

_OWN: dict[str, Objective] = {"sft": Sft(), "dpo": Dpo(), "orpo": Orpo()}
_MEMBERS = ("metrics", "gains", "asks_base", "check", "terms")


def find_objective(method: str) -> Objective:
    """The objective of a task's ``method``.

    Raises:
        UnsupportedError: No installed package brings it, or the one that does cannot be loaded or brings no objective.
    """
    if method in _OWN:
        return _OWN[method]
    found = entry_points(group=ENTRY_POINT_GROUP, name=method)
    if not found:
        raise UnsupportedError(
            f"method: expected one of {', '.join(_OWN)} or one that an installed package registers, found {method!r}; "
            "install that package here"
        )
    entry = next(iter(found))
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
    return objective
