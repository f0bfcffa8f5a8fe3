"""By what a task tells its adapters apart: the validation loss, or something its method measures, of which more is
better."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from alto.errors import SpecError
from alto.spec.job_config import JobConfig
from alto.spec.quoting import quoted

__all__ = ["LEAST_SCORE", "LOSS", "OWN_SCORES", "check_metric", "loss_scale", "metric_notes", "score_of"]

LOSS = "loss"

_PREFERENCE_SCORES = ("reward_accuracy", "reward_margin")
OWN_SCORES: Mapping[str, tuple[str, ...]] = {"sft": (), "dpo": _PREFERENCE_SCORES, "orpo": _PREFERENCE_SCORES}
"""What a task may choose by under each of ALTO's own methods; those that packages register know theirs themselves."""

_SCALING: Mapping[str, tuple[str, ...]] = {LOSS: ("loss_type", "beta", "label_smoothing"), "reward_margin": ("beta",)}
"""Settings of jobs that decide on which scale a metric is."""

LEAST_SCORE = -sys.float_info.max
"""The score of an evaluation whose metric is not finite: below every other."""


def check_metric(metric: str, method: str, scores: tuple[str, ...]) -> None:
    """Make sure that a task of ``method``, which measures ``scores``, can choose by ``metric``.

    Raises:
        SpecError: It cannot.
    """
    if metric in (LOSS, *scores):
        return
    having = [name for name, known in OWN_SCORES.items() if metric in known]
    remedy = f"change the method to {' or '.join(having)}" if having else "correct it"
    raise SpecError(
        f"metric should be {' or '.join((LOSS, *scores))} with method {quoted(method)}, found {quoted(metric)}. "
        f"Remove the key to choose by the validation loss, or {remedy}."
    )


def metric_notes(metric: str, method: str, configs: Iterable[JobConfig]) -> tuple[str, ...]:
    """What a user should know where jobs are compared by losses that are not on one scale, in sentences."""
    configs = list(configs)
    keys = _SCALING.get(metric, ()) if method in OWN_SCORES else ()
    differing = [key for key in keys if len({getattr(config, key) for config in configs}) > 1]
    if not differing:
        return ()
    what = "losses" if metric == LOSS else "margins"
    return (
        f"Jobs differ in {' and '.join(differing)}, and with that in the scale of the {what} by which they are "
        f"compared; metric: {_PREFERENCE_SCORES[0]} compares them by how often they are right.",
    )


def loss_scale(settings: Mapping[str, Any]) -> str:
    """What decides the scale of a job's loss, of its ``settings``: losses of two jobs with the same can be compared."""
    return ",".join(f"{key}={settings[key]}" for key in _SCALING[LOSS] if settings.get(key) is not None)


def score_of(metric: str, metrics: Mapping[str, Any]) -> float:
    """What an evaluation that measured ``metrics`` is worth to a task that chooses by ``metric``: more is better.

    0 where it chooses by the loss, so that all have the same and the loss decides. A value that is not finite counts as
    the least of all numbers, because an order has no place for it.

    Raises:
        KeyError: ``metric`` was not measured.
    """
    if metric == LOSS:
        return 0.0
    value = float(metrics[metric])
    return value if math.isfinite(value) else LEAST_SCORE
