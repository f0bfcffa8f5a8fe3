"""Parallel coordinates: one line per job through its settings to its best value.

A setting with few values has one band per value, in which lines are spread by their loss so that none hides another. A
setting with many numbers has a continuous axis, logarithmic if the numbers span decades. Positions are in [0, 1], from
low to high.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alto.export.metrics import describe_metrics, metric_name, shown_metrics
from alto.export.wording import (
    clean,
    describe_config,
    format_loss,
    format_setting,
    short_name,
    tidy_config,
    varying_keys,
)
from alto.runs import JobHistory, RunHistory
from alto.spec.metric import LOSS

__all__ = ["Axis", "parallel_figure", "result_axis", "setting_axis"]

MOST_BANDS = 12
DECADES_FOR_LOG = 1.0
BAND_SHARE = 0.6
NOT_FINITE_AT = 1.1
FIFTHS = ("best fifth", "second fifth", "third fifth", "fourth fifth", "last fifth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One vertical axis.

    Attributes:
        name: Heading of the axis.
        positions: Position at which every job crosses the axis; in [0, 1], or above if a value is not finite.
        ticks: Positions and labels beside the axis.
    """

    name: str
    positions: Mapping[str, float]
    ticks: tuple[tuple[float, str], ...]


def parallel_figure(history: RunHistory) -> dict[str, Any] | None:
    """Return the axes and one trace per job, the best drawn last; None if no setting varies or fewer than two jobs were
    evaluated."""
    jobs = [job for job in history.ranked() if job.evaluations]
    configs = {name: tidy_config(job.config) for name, job in history.jobs.items()}
    keys = varying_keys(list(configs.values()))
    if len(jobs) < 2 or not keys:
        return None
    order = [job.job for job in sorted(jobs, key=lambda job: job.rank_key)]
    axes = [setting_axis(short_name(key), {job: configs[job].get(key) for job in order}) for key in keys]
    if history.metric == LOSS:
        axes.append(result_axis("best validation loss", {job.job: job.best_validation_loss for job in jobs}))
    else:
        found = {job.job: job.best_metrics.get(history.metric, math.nan) for job in jobs}
        axes.append(result_axis(f"best {metric_name(history.metric)}", found))
    shown = shown_metrics(history)
    names = [name for name in order if math.isfinite(history.jobs[name].best_validation_loss)]
    seen: set[str] = set()
    traces = []
    for job in reversed(jobs):
        role, legend = _group(job, history.best, names)
        label = html.escape(describe_config(configs[job.job], keys))
        traces.append(
            {
                "y": [round(axis.positions[job.job], 4) for axis in axes],
                "name": legend,
                "legendgroup": role,
                "legendrank": 1 + list(_ROLES).index(role),
                "showlegend": role not in seen,
                "text": f"<b>{html.escape(clean(job.job))}</b><br>{label}"
                f"<br>best validation loss {_loss_text(job.best_validation_loss)}"
                + "".join(f"<br>{html.escape(describe_metrics(job.best_metrics, (name,)))}" for name in shown),
                "meta": {"role": role},
            }
        )
        seen.add(role)
    return {
        "traces": traces,
        "axes": [{"name": html.escape(clean(axis.name)), "ticks": _escaped(axis.ticks)} for axis in axes],
    }


def setting_axis(name: str, values: Mapping[str, Any]) -> Axis:
    """Return the axis of one setting; ``values`` holds the jobs by their loss, the best first."""
    numbers = {job: float(value) for job, value in values.items() if _is_number(value)}
    # Numbers with the same formatted text are one value.
    texts = {job: format_setting(value) for job, value in values.items()}
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
            positions[job] = (band + 0.5 + BAND_SHARE * offset) * height
    # If there are too many values, only every n-th gets a label.
    stride = math.ceil(len(ordered) / MOST_BANDS)
    ticks = [((band + 0.5) * height, text) for band, text in enumerate(ordered)][::stride]
    return Axis(name=name, positions=positions, ticks=tuple(ticks))


def result_axis(name: str, values: Mapping[str, float]) -> Axis:
    """Return the axis of the best values, lowest at the bottom; values that are not finite are above its end."""
    axis = _continuous(name, {job: value for job, value in values.items() if math.isfinite(value)})
    missing = {job: NOT_FINITE_AT for job, value in values.items() if not math.isfinite(value)}
    ticks = (*axis.ticks, (NOT_FINITE_AT, "none finite")) if missing else axis.ticks
    return Axis(name=axis.name, positions={**axis.positions, **missing}, ticks=ticks)


def _continuous(name: str, numbers: Mapping[str, float]) -> Axis:
    if not numbers:
        return Axis(name=name, positions={}, ticks=())
    low, high = min(numbers.values()), max(numbers.values())
    is_log = low > 0 and math.log10(high / low) >= DECADES_FOR_LOG
    scale = math.log10 if is_log else float
    bottom, extent = scale(low), (scale(high) - scale(low)) or 1.0
    ticks = [value for value in (_log_ticks(low, high) if is_log else _linear_ticks(low, high)) if low <= value <= high]
    return Axis(
        name=name,
        positions={job: (scale(value) - bottom) / extent for job, value in numbers.items()},
        ticks=tuple(((scale(value) - bottom) / extent, format_setting(value)) for value in ticks or [low]),
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
        return "best", f"best: {html.escape(clean(job.job))}"
    if job.job not in finite:
        return "not-finite", "no finite loss"
    fifth = len(FIFTHS) * finite.index(job.job) // len(finite)
    return f"fifth-{fifth}", FIFTHS[fifth]


def _loss_text(loss: float) -> str:
    return format_loss(loss) if math.isfinite(loss) else "not finite"


def _escaped(ticks: Sequence[tuple[float, str]]) -> list[list[Any]]:
    return [[round(position, 4), html.escape(text)] for position, text in ticks]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _order(value: Any) -> tuple[int, float, str]:
    """Return a sort key: missing values first, then numbers by size, then text."""
    if value is None:
        return (0, 0.0, "")
    return (1, float(value), "") if _is_number(value) else (2, 0.0, format_setting(value))
