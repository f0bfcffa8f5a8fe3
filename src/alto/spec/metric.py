"""The metric that a task selects by: the validation loss, or a metric of its method where higher is better."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

from alto.base import quoted
from alto.errors import SpecError
from alto.spec.job_config import JOB_FIELDS, JobConfig
from alto.spec.method import OWN_METHODS, find_method


def is_function(value: object) -> TypeGuard[Callable[..., Any]]:
    """Return whether ``value`` is a function, or an object that can be called like one; classes do not count."""
    return callable(value) and not isinstance(value, type)


def name_of(function: Callable[..., Any]) -> str:
    """Return the dotted name by which another process can import ``function``, such as ``package.module:score``.

    Raises:
        ValueError: ``function`` is defined in the main program or notebook, inside another function, or has no name in
            its module.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    found: Any = sys.modules.get(module) if isinstance(module, str) else None
    for part in (name or "").split("."):
        found = getattr(found, part, None)
    if found is function and module != "__main__":
        return f"{module}:{name}"
    where = "the program or the notebook itself" if module == "__main__" else str(module or "no module")
    raise ValueError(
        "should be a function that other processes can import by its name, found "
        f"{name or type(function).__name__} of {where}. Define it at the top of a module in the current folder, or in "
        "a package, and import it from there."
    )


_SOURCE_LOSS = "loss_on_"
LOSS = "loss"

LEAST_SCORE = -sys.float_info.max
"""The score of an evaluation whose metric is not finite; no other score is lower."""


def check_metric(metric: str, method: str, scores: tuple[str, ...]) -> None:
    """Check that a task of ``method``, which measures ``scores``, can select by ``metric``.

    Raises:
        SpecError: The method does not measure ``metric``.
    """
    if metric in (LOSS, *scores):
        return
    having = [name for name in OWN_METHODS if metric in find_method(name).entry.scores]
    remedy = f"change the method to {' or '.join(having)}" if having else "correct it"
    raise SpecError(
        f"metric should be {' or '.join((LOSS, *scores))} with method {quoted(method)}, found {quoted(metric)}. "
        f"Remove the key to choose by the validation loss, or {remedy}."
    )


def check_metric_name(value: object) -> object:
    """Return ``value`` unchanged unless it is a function.

    Raises:
        ValueError: ``value`` is a function.
    """
    if is_function(value):
        raise ValueError(
            f"should be the name of what is measured at every evaluation, found a function ({quoted(value)}). Give it "
            "as select_by: it is called with prompt, reference and answer of each validation row, and scores finalists."
        )
    return value


def metric_notes(metric: str, method: str, configs: Iterable[JobConfig]) -> tuple[str, ...]:
    """Return a notice if jobs are compared by losses, or by metrics, of different scales."""
    entry = find_method(method).entry
    settings = [config.objective for config in configs]
    keys = tuple(entry.settings.model_fields) if metric == LOSS else entry.scaled_by.get(metric, ())
    differing = [key for key in keys if len({getattr(given, key) for given in settings}) > 1]
    if not differing:
        return ()
    what = "losses" if metric == LOSS else metric.replace("_", " ")
    others = [score for score in entry.scores if not set(entry.scaled_by.get(score, ())) & set(differing)]
    remedy = f"; metric: {others[0]} does not depend on it" if others else ""
    return (
        f"Jobs differ in {' and '.join(differing)}, and therefore in the scale of the {what} by which they are "
        f"compared{remedy}.",
    )


def loss_scale(settings: Mapping[str, Any]) -> str:
    """Return text that identifies the scale of a job's loss: its method's settings. Only equal scales are comparable.

    Args:
        settings: The configuration of a job as in journals: one flat mapping with canonical keys.
    """
    of_method = sorted(settings.keys() - {*JOB_FIELDS})
    return ",".join(f"{key}={settings[key]}" for key in of_method if settings[key] is not None)


def score_of(metric: str, metrics: Mapping[str, Any]) -> float:
    """Return the score of an evaluation with ``metrics`` in a task that selects by ``metric``: higher is better.

    The score is always 0 if the task selects by the loss, so that the loss decides. A value that is not finite cannot
    be ordered, so it counts as the smallest number (:data:`LEAST_SCORE`).

    Raises:
        KeyError: ``metric`` was not measured.
    """
    if metric == LOSS:
        return 0.0
    value = float(metrics[metric])
    return value if math.isfinite(value) else LEAST_SCORE


def source_metric(source: str) -> str:
    """Return the name under which the validation loss on the rows of one mixture source is recorded."""
    return f"{_SOURCE_LOSS}{source}"


def source_of(metric: str) -> str | None:
    """Return the source whose loss ``metric`` is; None for any other metric."""
    return metric.removeprefix(_SOURCE_LOSS) if metric.startswith(_SOURCE_LOSS) else None
