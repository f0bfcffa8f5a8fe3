"""Names, units and formats of a method's metrics and loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from alto.errors import AltoError
from alto.records.evaluation import wilson_interval
from alto.runs import JobHistory, RunHistory
from alto.spec import find_method, source_of
from alto.views.wording import clean, format_loss, format_percent


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """The name of a metric in a narrow column, and its meaning with the unit."""

    short: str
    meaning: str


# The metrics that have columns and curves.
_WORDS: Mapping[str, _Words] = {
    "reward_accuracy": _Words(
        short="accuracy",
        meaning="Share of the validation pairs whose chosen reply earns a higher reward than the rejected reply.",
    ),
    "reward_margin": _Words(
        short="margin",
        meaning="Reward of the chosen reply minus the reward of the rejected reply, in nats times beta; mean over the "
        "validation pairs.",
    ),
    "accuracy": _Words(
        short="accuracy",
        meaning="Share of the validation rows for which the label, or every label, is predicted correctly.",
    ),
    "macro_f1": _Words(
        short="macro F1",
        meaning="Mean over the labels of F1, the harmonic mean of precision and recall.",
    ),
    "pearson": _Words(short="Pearson", meaning="Correlation of predicted numbers and labels, from -1 to 1."),
}


def shown_metrics(history: RunHistory) -> tuple[str, ...]:
    """Return the measured metrics that have a column and a curve; the metric that the task selects by comes first,
    unless that is the loss."""
    measured = dict.fromkeys(name for job in history.jobs.values() for name in job.best_metrics)
    of_sources = [name for name in measured if source_of(name) is not None]
    return tuple(name for name in dict.fromkeys((history.metric, *_WORDS, *of_sources)) if name in measured)


def metric_name(metric: str) -> str:
    """Return the name in words: ``reward accuracy`` for ``reward_accuracy``, ``macro F1`` for ``macro_f1``."""
    return clean(metric.replace("_", " ").replace(" f1", " F1"))


def short_metric(metric: str) -> str:
    """Return the name for a narrow column."""
    source = source_of(metric)
    if source is not None:
        return clean(f"on {source}")
    return _WORDS[metric].short if metric in _WORDS else metric_name(metric)


def metric_meaning(metric: str) -> str:
    """Return a sentence about the metric; empty for a metric of another package."""
    source = source_of(metric)
    if source is not None:
        return f"Validation loss on the rows of the source {source} of the mixture."
    return _WORDS[metric].meaning if metric in _WORDS else ""


def is_fraction(metric: str) -> bool:
    """Return whether the values of the metric are fractions, judged by its name."""
    return metric.endswith("accuracy") and source_of(metric) is None


def format_metric(metric: str, value: float | None) -> str:
    """Format a value: a fraction in percent, any other value like a loss, a missing value as a dash."""
    if value is not None and is_fraction(metric) and math.isfinite(value):
        return format_percent(value)
    return format_loss(value)


def describe_metrics(metrics: Mapping[str, float], names: tuple[str, ...], num_rows: int = 0) -> str:
    """Return text such as ``accuracy 71 % (95 % interval 56–82 %), macro F1 0.7034``; empty if none of ``names`` was
    measured.

    Args:
        num_rows: Number of rows that the metrics were measured on; 0 shows no intervals.
    """
    return ", ".join(
        f"{metric_name(name)} {format_metric(name, metrics[name])}{_interval(name, metrics[name], num_rows)}"
        for name in names
        if name in metrics
    )


def describe_best_metrics(history: RunHistory, job: JobHistory) -> str:
    """Return the metrics of a job's best evaluation; their intervals are those of the rows that it was made on."""
    num_validation = 0 if history.started is None else history.started.num_validation
    return describe_metrics(job.best_metrics, shown_metrics(history), len(job.best_loss_rows) or num_validation)


def _interval(metric: str, value: float, num_rows: int) -> str:
    if not num_rows or not is_fraction(metric) or not 0 <= value <= 1:
        return ""
    low, high = wilson_interval(value, num_rows)
    return f" (95 % interval {100 * low:.0f}–{100 * high:.0f} %)"


def describe_test(history: RunHistory, job: JobHistory) -> str:
    """Return loss and metrics on the test rows, such as ``0.3969, accuracy 83 % (95 % interval 71–91 %)``; empty if
    there are none."""
    if job.best_test_loss is None:
        return ""
    names = tuple(dict.fromkeys((history.metric, *_WORDS)))
    num_rows = 0 if history.started is None else history.started.data.get("test_rows", 0)
    metrics = describe_metrics(job.best_test_metrics, names, num_rows)
    return format_loss(job.best_test_loss) + (f", {metrics}" if metrics else "")


def loss_unit(method: str) -> str:
    """Return the unit of a method's loss."""
    try:
        unit = find_method(method).entry.loss_unit
    except AltoError:  # the run was made where the method's package is installed
        unit = ""
    return clean(unit) or f"in the unit of {clean(method)}"
