"""Finds objectives by the name of their method: those of ALTO, and those of installed packages."""

from __future__ import annotations

from alto.base import described, load_attribute
from alto.errors import UnsupportedError
from alto.objectives.base import DerivedMetrics, Objective, ObjectiveImplementation
from alto.spec import OBJECTIVES, find_method

_MEMBERS = ("check", "terms")


def find_objective(name: str) -> Objective:
    """Find the objective of the method called ``name``.

    Raises:
        SpecError: There is no such method.
        UnsupportedError: Several packages register the method, or a package registers one of ALTO's own; or the
            implementation cannot be loaded or is not an objective.
    """
    OBJECTIVES.check_not_taken(name)
    method = find_method(name)
    path = method.entry.implementation
    try:
        implementation = load_attribute(path)()
    except Exception as error:
        raise UnsupportedError(
            f"method: expected {path}, the implementation of {name!r}, found that it cannot be loaded "
            f"({described(error, path.partition(':')[0])}); repair or remove the package that registers it"
        ) from error
    if not isinstance(implementation, ObjectiveImplementation):
        missing = sorted(member for member in _MEMBERS if not hasattr(implementation, member))
        raise UnsupportedError(
            f"method: expected {path}, the implementation of {name!r}, to have check and terms, found it without "
            f"{', '.join(missing)}; give it what docs/objectives.md lists"
        )
    if method.entry.derived and not isinstance(implementation, DerivedMetrics):
        raise UnsupportedError(
            f"method: expected {path}, the implementation of {name!r}, to have num_statistics and derived_metrics for "
            f"{', '.join(method.entry.derived)}, found it without; give it what docs/objectives.md lists"
        )
    return Objective(method=method, implementation=implementation)
