"""All figures of a run, for the report and the service's dashboard; ``templates/report.js`` draws them."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alto.base import finite
from alto.report.figures import (
    TRAINING_LOSS,
    VALIDATION_LOSS,
    CurveFigure,
    curve_data,
    curve_figure,
    metric_quantity,
    occupancy_figure,
    point_view,
    role_of,
    sorted_roles,
)
from alto.report.importance import first_equal_fraction, point_at
from alto.runs import JobHistory, RunHistory
from alto.spec import LEAST_SCORE, LOSS
from alto.views import wording
from alto.views.metrics import (
    describe_metrics,
    format_metric,
    is_fraction,
    loss_unit,
    metric_meaning,
    metric_name,
    shown_metrics,
)
from alto.views.tables import JobTable, JobTableRow

_KEY = "learning_rate"

MAX_TICKS = 8
"""Largest number of rates with a tick each; with more rates, the axis has logarithmic ticks."""


def rate_figure(history: RunHistory, rows: Iterable[JobTableRow]) -> dict[str, Any] | None:
    """Return the plot of the learning rate against the selection metric, with one point per job; None if fewer than two
    rates above 0 were tried, or a mode has no finite value.

    Returns:
        ``modes``: after the same fraction of training, where all jobs can be compared, and at the best evaluation of
        each job; each has a name, a view and a note on the points that the view leaves out. ``traces``: one per role,
        with ``y`` for every mode.
    """
    labels = {row.history.job: row.label for row in rows}
    rates = {name: rate for name, job in history.jobs.items() if (rate := _rate(job)) is not None}
    distinct = sorted(set(rates.values()))
    if len(distinct) < 2:
        return None
    progress = first_equal_fraction(history)
    modes: list[tuple[str, Callable[[JobHistory], float | None]]] = [
        (
            f"after {wording.format_percent(progress)} of the steps",
            lambda job: _value_at(job, progress, history.metric),
        ),
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
        "yTickFormat": ".0%" if is_fraction(history.metric) else "",
        "xTicks": [[rate, wording.format_setting(rate)] for rate in distinct] if len(distinct) <= MAX_TICKS else [],
    }


def _rate(job: JobHistory) -> float | None:
    rate = job.config.get(_KEY)
    if isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate < math.inf:
        return float(rate)
    return None


def _value_at(job: JobHistory, progress: float, metric: str) -> float | None:
    point = None if job.origin else point_at(job, progress)
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
        is_bounded=is_fraction(history.metric),
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
        shown = wording.format_loss(value) if history.metric == LOSS else format_metric(history.metric, value)
        return f"<b>{html.escape(wording.clean(job))}</b><br>{html.escape(labels[job])}<br>{shown}"

    best = f"best: {html.escape(wording.clean(jobs[0]))}"
    return {
        "name": best if role == "best" else f"{html.escape(role)} ({len(jobs)})",
        "x": [rates[job] for job in jobs],
        "y": [[finite(found[job]) for job in jobs] for found in values],
        "text": [[text(job, found[job]) for job in jobs] for found in values],
        "meta": {"role": role},
    }


# Parallel coordinates: one line per job through its settings to its best value.
#
# A setting with few values has one band per value, in which lines are spread by their loss so that none hides another.
# A setting with many numbers has a continuous axis, logarithmic if the numbers span decades. Positions are in [0, 1],
# from low to high.

MOST_BANDS = 12
DECADES_FOR_LOG = 1.0
BAND_FRACTION = 0.6
NOT_FINITE_AT = 1.1
FIFTHS = ("best fifth", "second fifth", "third fifth", "fourth fifth", "last fifth")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotAxis:
    """One vertical axis.

    Attributes:
        positions: Position at which every job crosses the axis; in [0, 1], or above if a value is not finite.
        ticks: Positions and labels next to the axis.
    """

    name: str
    positions: Mapping[str, float]
    ticks: tuple[tuple[float, str], ...]


def parallel_figure(history: RunHistory) -> dict[str, Any] | None:
    """Return the axes and one trace per job, the best drawn last; None if no setting varies or fewer than two jobs were
    evaluated."""
    jobs = [job for job in history.ranked() if job.evaluations]
    configs = {name: wording.tidy_config(job.config) for name, job in history.jobs.items()}
    keys = wording.varying_keys(list(configs.values()))
    if len(jobs) < 2 or not keys:
        return None
    order = [job.job for job in sorted(jobs, key=lambda job: job.rank_key)]
    axes = [setting_axis(wording.short_name(key), {job: configs[job].get(key) for job in order}) for key in keys]
    if history.metric == LOSS:
        axes.append(result_axis("best validation loss", {job.job: job.best_validation_loss for job in jobs}))
    else:
        best_values = {job.job: job.best_metrics.get(history.metric, math.nan) for job in jobs}
        axes.append(result_axis(f"best {metric_name(history.metric)}", best_values))
    shown = shown_metrics(history)
    names = [name for name in order if math.isfinite(history.jobs[name].best_validation_loss)]
    seen: set[str] = set()
    traces = []
    for job in reversed(jobs):
        role, legend = _group(job, history.best, names)
        label, loss = html.escape(wording.describe_config(configs[job.job], keys)), job.best_validation_loss
        traces.append(
            {
                "y": [round(axis.positions[job.job], 4) for axis in axes],
                "name": legend,
                "legendgroup": role,
                "legendrank": 1 + list(_ROLES).index(role),
                "showlegend": role not in seen,
                "text": f"<b>{html.escape(wording.clean(job.job))}</b><br>{label}"
                f"<br>best validation loss {wording.format_loss(loss) if math.isfinite(loss) else 'not finite'}"
                + "".join(f"<br>{html.escape(describe_metrics(job.best_metrics, (name,)))}" for name in shown),
                "meta": {"role": role},
            }
        )
        seen.add(role)
    return {
        "traces": traces,
        "axes": [
            {
                "name": html.escape(wording.clean(axis.name)),
                "ticks": [[round(position, 4), html.escape(text)] for position, text in axis.ticks],
            }
            for axis in axes
        ],
    }


def setting_axis(name: str, values: Mapping[str, Any]) -> PlotAxis:
    """Return the axis of one setting; ``values`` holds the jobs by their loss, the best first."""
    numbers = {job: float(value) for job, value in values.items() if _is_number(value)}
    # Numbers with the same formatted text are one value.
    texts = {job: wording.format_setting(value) for job, value in values.items()}
    distinct = {texts[job]: value for job, value in values.items()}
    if len(numbers) == len(values) and len(distinct) > MOST_BANDS:
        return _continuous(name, numbers)
    ordered = sorted(distinct, key=lambda text: _order(distinct[text]))
    height = 1.0 / len(ordered)
    positions: dict[str, float] = {}
    for band, text in enumerate(ordered):
        jobs = [job for job in texts if texts[job] == text]
        for index, job in enumerate(jobs):
            offset = (index + 0.5) / len(jobs) - 0.5
            positions[job] = (band + 0.5 + BAND_FRACTION * offset) * height
    # If there are too many values, only every n-th gets a label.
    stride = math.ceil(len(ordered) / MOST_BANDS)
    ticks = [((band + 0.5) * height, text) for band, text in enumerate(ordered)][::stride]
    return PlotAxis(name=name, positions=positions, ticks=tuple(ticks))


def result_axis(name: str, values: Mapping[str, float]) -> PlotAxis:
    """Return the axis of the best values, lowest at the bottom; values that are not finite are above its end."""
    axis = _continuous(name, {job: value for job, value in values.items() if math.isfinite(value)})
    missing = {job: NOT_FINITE_AT for job, value in values.items() if not math.isfinite(value)}
    ticks = (*axis.ticks, (NOT_FINITE_AT, "none finite")) if missing else axis.ticks
    return PlotAxis(name=axis.name, positions={**axis.positions, **missing}, ticks=ticks)


def _continuous(name: str, numbers: Mapping[str, float]) -> PlotAxis:
    if not numbers:
        return PlotAxis(name=name, positions={}, ticks=())
    low, high = min(numbers.values()), max(numbers.values())
    is_log = low > 0 and math.log10(high / low) >= DECADES_FOR_LOG
    scale = math.log10 if is_log else float
    bottom, extent = scale(low), (scale(high) - scale(low)) or 1.0
    ticks = [value for value in (_log_ticks(low, high) if is_log else _linear_ticks(low, high)) if low <= value <= high]
    return PlotAxis(
        name=name,
        positions={job: (scale(value) - bottom) / extent for job, value in numbers.items()},
        ticks=tuple(((scale(value) - bottom) / extent, wording.format_setting(value)) for value in ticks or [low]),
    )


def _linear_ticks(low: float, high: float) -> list[float]:
    if high <= low:
        return [low]
    magnitude = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if (high - low) / (factor * magnitude) <= 6)
    return [float(f"{index * step:.6g}") for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = math.ceil((last - first) / 8)
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    return [factor * 10.0**exponent for exponent in range(first, last + 1, stride) for factor in factors]


_ROLES = ("best", *(f"fifth-{index}" for index in range(len(FIFTHS))), "not-finite")


def _group(job: JobHistory, best: JobHistory | None, finite: Sequence[str]) -> tuple[str, str]:
    """Return the role and the legend entry of a job; ``finite`` names the jobs with a finite loss, best first."""
    if job is best:
        return "best", f"best: {html.escape(wording.clean(job.job))}"
    if job.job not in finite:
        return "not-finite", "no finite loss"
    fifth = len(FIFTHS) * finite.index(job.job) // len(finite)
    return f"fifth-{fifth}", FIFTHS[fifth]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _order(value: Any) -> tuple[int, float, str]:
    """Return a sort key: missing values first, then numbers by size, then text."""
    if value is None:
        return (0, 0.0, "")
    return (1, float(value), "") if _is_number(value) else (2, 0.0, wording.format_setting(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """The figures of a run.

    Attributes:
        metric_sections: Id, name, meaning and view of the figure of each metric, in the order of the table's columns.
        data: All figures by id, as data for ``templates/report.js``; None for a figure that has too little data.
        opens_logarithmic: Whether the axis of progress is logarithmic at first.
    """

    validation: CurveFigure
    train: CurveFigure
    metric_sections: tuple[Mapping[str, Any], ...]
    data: Mapping[str, Any]
    opens_logarithmic: bool


def run_figures(history: RunHistory, table: JobTable) -> RunFigures:
    """Return the figures of ``history``, whose job table is ``table``."""
    validation = curve_figure(history, table.rows, VALIDATION_LOSS)
    train = curve_figure(history, table.rows, TRAINING_LOSS)
    quantities = {name: metric_quantity(name) for name in table.metrics}
    metrics = {name: curve_figure(history, table.rows, quantity) for name, quantity in quantities.items()}
    unit = loss_unit(history.method)
    return RunFigures(
        validation=validation,
        train=train,
        metric_sections=tuple(
            {
                "id": f"metric-{index}",
                "name": metric_name(name),
                "meaning": metric_meaning(name),
                "view": metrics[name].view,
            }
            for index, name in enumerate(table.metrics)
        ),
        data={
            "parallel": parallel_figure(history),
            "rates": rate_figure(history, table.rows),
            "validation": curve_data(validation, f"validation loss, {unit}"),
            "train": curve_data(train, f"smoothed training loss, {unit}"),
            **{
                f"metric-{index}": curve_data(metrics[name], metric_name(name), quantities[name].tick_format)
                for index, name in enumerate(table.metrics)
            },
            "slots": occupancy_figure(history, table.rows),
        },
        # Early rungs would crowd everything at the left edge of a linear axis.
        opens_logarithmic=any(history.fraction_after(rung) <= 0.2 for rung in history.rung_settings),
    )
