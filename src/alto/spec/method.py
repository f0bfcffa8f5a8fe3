"""What a task may ask to have learned from its rows, and which settings belong to that."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from alto.errors import SpecError, UnknownKeyError
from alto.spec.quoting import quoted

__all__ = ["ENTRY_POINT_GROUP", "LOSS_TYPES", "OWN_METHODS", "check_method", "method_defaults"]

ENTRY_POINT_GROUP = "alto.objectives"
"""Where packages register methods of their own."""

LOSS_TYPES = ("sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", "apo_zero", "apo_down")
"""Forms of the loss of ``dpo``."""

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "sft": {},
    "dpo": {"beta": 0.1, "loss_type": "sigmoid", "label_smoothing": 0.0},
    "orpo": {"beta": 0.1},
}
OWN_METHODS = tuple(_DEFAULTS)

_KEYS = ("beta", "loss_type", "label_smoothing")
_SMOOTHED = ("sigmoid", "robust")


def check_method(method: str) -> str:
    """``method`` if somebody has it.

    Raises:
        ValueError: Nobody does.
    """
    others = sorted(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))
    if method not in (*OWN_METHODS, *others):
        raise ValueError(
            f"should be one of {', '.join((*OWN_METHODS, *others))}, found {quoted(method)}. Correct the name, or "
            f"install the package that registers it under {ENTRY_POINT_GROUP}."
        )
    return method


def method_defaults(method: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a job with ``values`` has beside them, as its method has settings of its own.

    Raises:
        UnknownKeyError: A value belongs to other methods.
        SpecError: A value is not one of the method's.
    """
    defaults = _DEFAULTS.get(method)
    if defaults is None:
        return {}  # of a method of the user's own, which checks its settings itself
    for key in _KEYS:
        if values.get(key) is not None and key not in defaults:
            having = [name for name, known in _DEFAULTS.items() if key in known]
            raise UnknownKeyError(
                f"{key!r} is a setting of method {' and '.join(having)}, found with method {method!r}. Remove the key, "
                "or change the method."
            )
    missing = {key: value for key, value in defaults.items() if values.get(key) is None}
    chosen = {**values, **missing}
    loss_type, smoothing = chosen.get("loss_type"), chosen.get("label_smoothing")
    if method == "dpo" and loss_type not in LOSS_TYPES:
        raise SpecError(f"loss_type should be one of {', '.join(LOSS_TYPES)}, found {quoted(loss_type)}. Correct it.")
    if method == "dpo" and smoothing and loss_type not in _SMOOTHED:
        raise SpecError(
            f"label_smoothing should be 0 with loss_type {loss_type!r}, which knows none ({' and '.join(_SMOOTHED)} "
            f"do), found {smoothing}. Remove one of the two."
        )
    return missing
