"""What a task may ask to have learned from its rows, and which settings belong to that."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from alto.errors import SpecError, UnknownKeyError
from alto.spec.quoting import quoted

__all__ = [
    "ENTRY_POINT_GROUP",
    "LOSS_TYPES",
    "METHOD_SETTINGS",
    "OWN_METHODS",
    "check_method",
    "learns_from_pairs",
    "method_defaults",
]

ENTRY_POINT_GROUP = "alto.objectives"
"""Where packages register methods of their own."""

LOSS_TYPES = ("sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", "apo_zero", "apo_down")
"""Forms of the loss of ``dpo``."""

_SMOOTHED = ("sigmoid", "robust")
"""Those of them that know ``label_smoothing``."""

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "sft": {},
    "dpo": {"beta": 0.1, "loss_type": "sigmoid", "label_smoothing": 0.0},
    "orpo": {"beta": 0.1},
}
"""Settings that a method has beside those of every job."""

OWN_METHODS = tuple(_DEFAULTS)
"""Methods that need no package."""

METHOD_SETTINGS = tuple(dict.fromkeys(key for known in _DEFAULTS.values() for key in known))
"""Settings of a job that its objective may read."""


def check_method(method: str) -> str:
    """``method`` if somebody has it.

    Raises:
        ValueError: Nobody does.
    """
    if method in OWN_METHODS:
        return method
    others = sorted({entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)})
    if method not in others:
        remedy = (
            f"Write method: dpo and loss_type: {method}."
            if method in LOSS_TYPES
            else f"Correct the name, or install the package that registers it under {ENTRY_POINT_GROUP}."
        )
        raise ValueError(f"should be one of {', '.join((*OWN_METHODS, *others))}, found {quoted(method)}. {remedy}")
    return method


def learns_from_pairs(method: str) -> bool | None:
    """Whether the rows of ``method`` are preference pairs; None where a package brings it, which alone knows."""
    return method != "sft" if method in OWN_METHODS else None


def method_defaults(method: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a job with ``values`` has beside them, as its method has settings of its own.

    Raises:
        UnknownKeyError: A value belongs to other methods.
        SpecError: A value is not one of the method's.
    """
    defaults = _DEFAULTS.get(method)
    if defaults is None:
        return {}  # of a package's method, whose objective checks its settings itself
    for key in METHOD_SETTINGS:
        if values.get(key) is not None and key not in defaults:
            having = [name for name, known in _DEFAULTS.items() if key in known]
            raise UnknownKeyError(
                f"{key!r} is a setting of method {' and '.join(having)}, found with method {method!r}. Remove the key, "
                "or change the method."
            )
    missing = {key: value for key, value in defaults.items() if values.get(key) is None}
    if method == "dpo":
        _check_dpo({**values, **missing})
    return missing


def _check_dpo(settings: Mapping[str, Any]) -> None:
    loss_type, smoothing = settings["loss_type"], settings["label_smoothing"]
    if loss_type not in LOSS_TYPES:
        remedy = f"Write method: {loss_type}." if loss_type in OWN_METHODS else "Write one of those."
        raise SpecError(f"loss_type should be one of {', '.join(LOSS_TYPES)}, found {quoted(loss_type)}. {remedy}")
    if smoothing and loss_type not in _SMOOTHED:
        raise SpecError(
            f"label_smoothing should be 0 with loss_type {loss_type!r}, found {smoothing}. Remove it, or write one of "
            f"the forms that know it: {' or '.join(_SMOOTHED)}."
        )
