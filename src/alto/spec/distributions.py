"""Distributions of Optuna and of Ray Tune in a search space, as ranges and lists.

They are recognised by module and class, so that neither package has to be installed.
"""

from __future__ import annotations

import math
from typing import Any

from alto.errors import SpecError
from alto.spec.quoting import quoted

__all__ = ["as_values"]

_MAX_VALUES = 10_000


def as_values(value: Any, path: str) -> Any:
    """A list or a range as :meth:`alto.spec.SearchSpace.parse` takes them; any other value is returned as it is.

    Args:
        value: ``FloatDistribution``, ``IntDistribution`` or ``CategoricalDistribution`` of Optuna; ``choice``,
            ``uniform``, ``loguniform``, ``randint``, ``lograndint`` (without their upper end) or ``grid_search`` of Ray
            Tune.
        path: Where it stands, for messages.

    Raises:
        SpecError: A distribution that is no range and no list, such as a normal one.
    """
    package, kind = type(value).__module__.partition(".")[0], type(value).__name__
    if package == "optuna" and kind.endswith("Distribution"):
        return _of_optuna(value, kind, path)
    if package == "ray" and kind in ("Float", "Integer", "Categorical", "Function", "Quantized"):
        return _of_ray(value, kind, path)
    if isinstance(value, dict) and value.keys() == {"grid_search"}:
        return value["grid_search"]
    return value


def _of_optuna(value: Any, kind: str, path: str) -> Any:
    if kind == "CategoricalDistribution":
        return list(value.choices)
    if kind not in ("FloatDistribution", "IntDistribution"):
        raise _unknown(value, path)
    step = value.step
    if step is not None and not (kind == "IntDistribution" and step == 1):
        count = math.floor((value.high - value.low) / step + 1e-9) + 1
        if count > _MAX_VALUES:
            raise SpecError(f"{path} should have at most {_MAX_VALUES} values, found {count} in {quoted(value)}.")
        # Multiples of the step are rounded, so that 0.1 and 3 steps of 0.1 give 0.4.
        return [
            value.low + index * step if kind == "IntDistribution" else _rounded(value.low + index * step)
            for index in range(count)
        ]
    return {"min": value.low, "max": value.high, "log": bool(value.log)}


def _of_ray(value: Any, kind: str, path: str) -> Any:
    if kind == "Categorical":
        return list(value.categories)
    sampler = type(value.sampler).__name__.lstrip("_") if getattr(value, "sampler", None) is not None else "Uniform"
    if kind not in ("Float", "Integer") or sampler not in ("Uniform", "LogUniform"):
        raise _unknown(value, path)
    # Ray's whole numbers end before their upper end.
    high = value.upper - 1 if kind == "Integer" else value.upper
    return {"min": value.lower, "max": high, "log": sampler == "LogUniform"}


def _rounded(value: float) -> float:
    return float(f"{value:.12g}")


def _unknown(value: object, path: str) -> SpecError:
    return SpecError(
        f"{path} should be a value, a list, a range, or a distribution that is uniform or uniform in the logarithm, "
        f"found {quoted(value)}. Write {{min: …, max: …, log: true}}, or a list."
    )
