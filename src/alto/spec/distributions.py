"""Conversion of Optuna, Ray Tune and W&B sweep distributions in a search space into ranges and lists.

They are recognised by module and class, or by their keys, so none of these packages has to be installed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from alto.errors import SpecError
from alto.spec.quoting import quoted

__all__ = ["as_values"]

_MAX_VALUES = 10_000

_OF_SWEEPS = frozenset({"distribution", "values", "value", "min", "max"})
"""Keys that a W&B sweep parameter may have if it is a list, a value or a range."""


def as_values(value: Any, path: str, *, is_integer: bool) -> Any:
    """Convert a distribution to a list or range that :meth:`alto.spec.SearchSpace.parse` accepts.

    NumPy arrays with one axis and Python's ``range`` become lists. Any other value is returned unchanged.

    A distribution with a single value becomes a list of one. A distribution of whole numbers becomes a list of them if
    the field also takes fractions, because a range of that field would contain fractions.

    Args:
        value: ``FloatDistribution``, ``IntDistribution`` or ``CategoricalDistribution`` of Optuna; ``choice``,
            ``uniform``, ``loguniform``, ``randint``, ``lograndint`` (both exclude their upper end) or ``grid_search``
            of Ray Tune; a parameter of a W&B sweep: ``{values: […]}``, ``{value: …}``,
            ``{distribution: …, min: …, max: …}``.
        path: Place of the value in the task, for error messages.
        is_integer: Whether ranges of the field contain only whole numbers.

    Raises:
        SpecError: The distribution is neither a range nor a list (a normal distribution, for example).
    """
    package, kind = type(value).__module__.partition(".")[0], type(value).__name__
    if package == "optuna" and kind.endswith("Distribution"):
        return _of_optuna(value, kind, path, is_integer=is_integer)
    if package == "ray" and kind in ("Float", "Integer", "Categorical", "Function", "Quantized"):
        return _of_ray(value, kind, path, is_integer=is_integer)
    if isinstance(value, range) or (package == "numpy" and getattr(value, "ndim", None) == 1):
        _check_count(len(value), value, path)
        return list(value) if isinstance(value, range) else value.tolist()
    if isinstance(value, dict) and value.keys() == {"grid_search"}:
        return value["grid_search"]
    if isinstance(value, Mapping) and value.keys() & {"distribution", "values", "value"}:
        return _of_a_sweep(value, path)
    return value


def _of_a_sweep(value: Mapping[Any, Any], path: str) -> Any:
    # ``uniform`` and ``int_uniform`` are the same here: the field decides whether the numbers are whole.
    kind = value.get("distribution")
    if value.keys() - _OF_SWEEPS:
        raise _unknown(dict(value), path)
    if kind in (None, "categorical") and isinstance(value.get("values"), list):
        return value["values"]
    if kind in (None, "constant") and "value" in value:
        return value["value"]
    if kind in ("uniform", "int_uniform", "log_uniform_values") and {"min", "max"} <= value.keys():
        return {"min": value["min"], "max": value["max"], "log": kind == "log_uniform_values"}
    raise _unknown(dict(value), path)


def _of_optuna(value: Any, kind: str, path: str, *, is_integer: bool) -> Any:
    if kind == "CategoricalDistribution":
        return list(value.choices)
    if kind not in ("FloatDistribution", "IntDistribution"):
        raise _unknown(value, path)
    is_whole = kind == "IntDistribution"
    step = value.step
    if step is not None and not (is_whole and step == 1):
        count = math.floor((value.high - value.low) / step + 1e-9) + 1
        _check_count(count, value, path)
        # Multiples of the step are rounded, so that 0.1 and 3 steps of 0.1 give 0.4.
        return [value.low + index * step if is_whole else _rounded(value.low + index * step) for index in range(count)]
    if is_whole and not is_integer:
        return _whole_numbers(value, value.low, value.high, path, log=value.log)
    return _range(value.low, value.high, log=value.log)


def _of_ray(value: Any, kind: str, path: str, *, is_integer: bool) -> Any:
    if kind == "Categorical":
        return list(value.categories)
    sampler = type(value.sampler).__name__.lstrip("_") if getattr(value, "sampler", None) is not None else "Uniform"
    if kind not in ("Float", "Integer") or sampler not in ("Uniform", "LogUniform"):
        raise _unknown(value, path)
    log = sampler == "LogUniform"
    if kind == "Float":
        return _range(value.lower, value.upper, log=log)
    high = value.upper - 1  # Ray's integer ranges exclude their upper end
    return _range(value.lower, high, log=log) if is_integer else _whole_numbers(value, value.lower, high, path, log=log)


def _range(low: float, high: float, *, log: bool) -> Any:
    return [low] if low == high else {"min": low, "max": high, "log": bool(log)}


def _whole_numbers(value: object, low: int, high: int, path: str, *, log: bool) -> list[int]:
    """Return all whole numbers of a distribution, for a field that also takes fractions."""
    if log and low != high:
        raise SpecError(
            f"{path} should be a range of real numbers, or a list, because the field is not limited to whole numbers, "
            f"found {quoted(value)}. Write {{min: {low}, max: {high}, log: true}}, or list some of them."
        )
    _check_count(high - low + 1, value, path)
    return list(range(low, high + 1))


def _check_count(count: int, value: object, path: str) -> None:
    if count > _MAX_VALUES:
        raise SpecError(f"{path} should have at most {_MAX_VALUES} values, found {count} in {quoted(value)}.")


def _rounded(value: float) -> float:
    return float(f"{value:.12g}")


def _unknown(value: object, path: str) -> SpecError:
    return SpecError(
        f"{path} should be a value, a list, a range, or a uniform or log-uniform distribution, found {quoted(value)}. "
        "Write {min: …, max: …, log: true}, or a list."
    )
