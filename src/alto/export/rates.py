"""Plots the learning rate against the selection metric: one point per job, at an equal share of training and at the
job's best."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable
from typing import Any

from alto.export.figures import point_view, role_of, sorted_roles
from alto.export.importance import first_equal_share, point_at
from alto.export.metrics import format_metric, is_share, metric_name
from alto.export.tables import JobRow
from alto.export.wording import clean, format_loss, format_setting, format_share
from alto.runs import JobHistory, RunHistory
from alto.spec.metric import LEAST_SCORE, LOSS

__all__ = ["rate_figure"]

_KEY = "learning_rate"

MAX_TICKS = 8
"""Largest number of rates with a tick each; with more rates, the axis has logarithmic ticks."""


def rate_figure(history: RunHistory, rows: Iterable[JobRow]) -> dict[str, Any] | None:
    """Return the points of all jobs; None if fewer than two rates above 0 were tried, or a mode has no finite value.

    Args:
        history: The run.
        rows: Jobs of the table, best first.

    Returns:
        ``modes``: at an equal share of training, where all jobs can be compared, and at the best of each job; each has
        a name, a view and a note on what the view leaves out. ``traces``: one per role, with ``y`` for every mode.
    """
    labels = {name: row.label for name, row in zip((job.job for job in history.ranked()), rows, strict=True)}
    rates = {name: rate for name, job in history.jobs.items() if (rate := _rate(job)) is not None}
    distinct = sorted(set(rates.values()))
    if len(distinct) < 2:
        return None
    share = first_equal_share(history)
    modes: list[tuple[str, Callable[[JobHistory], float | None]]] = [
        (f"after {format_share(share)} of the steps", lambda job: _value_at(job, share, history.metric)),
        ("at its best", lambda job: _best_value(job, history.metric)),
    ]
    values = [{name: value_of(history.jobs[name]) for name in rates} for _, value_of in modes]
    described = [_mode(history, name, found) for (name, _), found in zip(modes, values, strict=True)]
    if any(mode is None for mode in described):
        return None
    roles = {name: role_of(history.jobs[name], history.best) for name in rates}
    return {
        "modes": described,
        "traces": [
            _trace(history, role, [name for name in rates if roles[name] == role], rates, values, labels)
            for role in sorted_roles(roles.values())
        ],
        "yTitle": html.escape("validation loss" if history.metric == LOSS else metric_name(history.metric)),
        "yTickFormat": ".0%" if is_share(history.metric) else "",
        "xTicks": [[rate, format_setting(rate)] for rate in distinct] if len(distinct) <= MAX_TICKS else [],
    }


def _rate(job: JobHistory) -> float | None:
    rate = job.config.get(_KEY)
    if isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate < math.inf:
        return float(rate)
    return None


def _value_at(job: JobHistory, share: float, metric: str) -> float | None:
    point = None if job.origin else point_at(job, share)
    if point is None:
        return None
    if metric == LOSS:
        return point.validation_loss
    return point.score if point.score > LEAST_SCORE else None  # LEAST_SCORE replaces scores that are not finite


def _best_value(job: JobHistory, metric: str) -> float | None:
    if not job.best_step:
        return None
    return job.best_validation_loss if metric == LOSS else job.best_metrics.get(metric)


def _mode(history: RunHistory, name: str, values: dict[str, float | None]) -> dict[str, Any] | None:
    """Return the name, the view and the note of a mode; None if no value is finite."""
    view = point_view(
        [math.nan if value is None else value for value in values.values()],
        more_is_better=history.metric != LOSS,
        is_bounded=is_share(history.metric),
    )
    if view is None:
        return None
    notes = [f"{view.num_not_finite} of {len(values)} jobs have no finite value {name}." if view.num_not_finite else ""]
    if view.num_outside:
        subject = "1 job lies" if view.num_outside == 1 else f"{view.num_outside} jobs lie"
        where = "below" if view.more_is_better else "above"
        notes.append(f"{subject} {where} this view; double-click the figure to see everything.")
    return {"name": name, "view": [view.low, view.high], "note": " ".join(filter(None, notes))}


def _trace(
    history: RunHistory,
    role: str,
    jobs: list[str],
    rates: dict[str, float],
    values: list[dict[str, float | None]],
    labels: dict[str, str],
) -> dict[str, Any]:
    def text(job: str, value: float | None) -> str:
        shown = format_loss(value) if history.metric == LOSS else format_metric(history.metric, value)
        return f"<b>{html.escape(clean(job))}</b><br>{html.escape(labels[job])}<br>{shown}"

    return {
        "name": f"best: {html.escape(clean(jobs[0]))}" if role == "best" else f"{html.escape(role)} ({len(jobs)})",
        "x": [rates[job] for job in jobs],
        "y": [[_finite(found[job]) for job in jobs] for found in values],
        "text": [[text(job, found[job]) for job in jobs] for found in values],
        "meta": {"role": role},
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
