"""The figures of the report as plotly.js traces: plain lists and dicts, no colours.

A trace names its role in ``meta.role`` (an outcome or ``best``); the page gives every role its colour in the light and
the dark scheme. Text that comes from a user is escaped for plotly, which interprets some HTML.
"""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alto.runs import JobHistory, RunHistory
from alto.spec import source_of
from alto.views.metrics import is_fraction, metric_name
from alto.views.tables import JobTableRow
from alto.views.wording import describe_rung, format_count, format_duration, format_loss, format_percent

FAR = 10
"""A job has diverged if its loss is above the lowest loss by more than this multiple of the scale. The scale is the
extent of the best curves, the lowest loss, or 1.0, whichever is the highest."""

# Later roles are drawn over earlier ones.
_DRAWING_ORDER = (
    "underperforming",
    "diverging",
    "stopped",
    "budget",
    "failed",
    "overfitting",
    "collapsed",
    "pending",
    "parked",
    "training",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A quantity that is drawn for every job.

    Attributes:
        values_of: Returns the value at each evaluation of a job.
        hover: Name and value as a plotly hover template.
        tick_format: Format of the axis, in d3's syntax; empty for plotly's default.
        is_bounded: Whether values have a fixed range, so that no curve can flatten the others.
    """

    values_of: Callable[[JobHistory], Sequence[float]]
    hover: str = "loss %{y:.4f}"
    tick_format: str = ""
    more_is_better: bool = False
    is_bounded: bool = False


VALIDATION_LOSS = Quantity(values_of=lambda job: [point.validation_loss for point in job.evaluations])
TRAINING_LOSS = Quantity(values_of=lambda job: [point.train_ema for point in job.evaluations])


def metric_quantity(metric: str) -> Quantity:
    """Return the quantity of a metric, for which higher is better, or of the loss on a source of a mixture."""
    return Quantity(
        values_of=lambda job: [metrics.get(metric, math.nan) for metrics in job.metrics],
        hover=f"{html.escape(metric_name(metric))} %{{y:{'.1%' if is_fraction(metric) else '.4f'}}}",
        tick_format=".0%" if is_fraction(metric) else "",
        more_is_better=source_of(metric) is None,
        is_bounded=is_fraction(metric),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleRange:
    """The range of values that a figure shows at first. It may leave out bad values.

    Attributes:
        num_outside: Number of jobs whose curve leaves the range on the side of bad values.
        num_not_finite: Number of jobs with a value that is infinite or not a number.
    """

    low: float
    high: float
    more_is_better: bool
    num_outside: int
    worst: float
    num_not_finite: int

    @property
    def note(self) -> str:
        """A sentence about what the view leaves out, for a figure in a page; empty if nothing."""
        return f"{self.left_out} Double-click the figure to see everything." if self.num_outside else self.left_out

    @property
    def left_out(self) -> str:
        """A sentence about what the view leaves out; empty if nothing."""
        notes = []
        if self.num_outside:
            subject = "1 job leaves" if self.num_outside == 1 else f"{self.num_outside} jobs leave"
            where, which = ("bottom", "lowest value") if self.more_is_better else ("top", "highest loss")
            notes.append(
                f"{subject} this view at the {where} ({which} {format_loss(self.worst)}): "
                "the axis is cut so that the others stay readable."
            )
        if self.num_not_finite:
            subject = "1 job" if self.num_not_finite == 1 else f"{self.num_not_finite} jobs"
            what = "value" if self.more_is_better else "loss"
            notes.append(f"{subject} reached a {what} that is not finite; such points cannot be drawn.")
        return " ".join(notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveFigure:
    """Curves of one figure.

    Attributes:
        rungs: The rungs: places on the axis, labels, and labels for narrow figures.
        view: The initial view; None if there is nothing to show.
    """

    traces: list[dict[str, Any]]
    rungs: list[tuple[float, str, str]]
    view: VisibleRange | None


def choose_view(
    curves: Mapping[str, Sequence[float]], *, more_is_better: bool = False, is_bounded: bool = False, best: str = ""
) -> VisibleRange | None:
    """Choose the range that shows the jobs worth comparing, however far other jobs diverge; None without finite values.

    The best quarter of the curves (by lowest loss) sets the scale: its extent runs from the lowest loss to the typical
    first loss of these curves. The view contains losses up to four extents above the lowest, and losses that are not
    outliers of the best quarter: at most three interquartile ranges above its upper quartile. So up to three quarters
    of the jobs may diverge without flattening the rest. The view also contains the curve ``best`` from its lowest point
    to at least its median, and the lowest points of the better half of the jobs, except those of diverged jobs
    (``FAR``). If higher is better, the rule is mirrored; if values are bounded, everything is in view.

    Args:
        best: Id of the best job; empty without one.
    """
    sign = -1.0 if more_is_better else 1.0
    finite = {name: kept for name, curve in curves.items() if (kept := [sign * x for x in curve if math.isfinite(x)])}
    if not finite:
        return None
    by_lowest = sorted(finite.values(), key=min)
    core = by_lowest[: max(1, math.ceil(len(by_lowest) / 4))]
    low = min(core[0])
    began = statistics.median(curve[0] for curve in core)
    extent = max(began - low, min(core[-1]) - low, 0.02 * abs(low), 1e-6)
    far = low + FAR * max(extent, abs(low), 1.0)
    half = [lowest for curve in by_lowest[: math.ceil(len(by_lowest) / 2)] if (lowest := min(curve)) <= far]
    fence = _outer_fence([loss for curve in core for loss in curve if loss <= far])
    wanted = (low + 4 * extent, fence, statistics.median_high(finite.get(best, [low])), *half)
    limit = math.inf if is_bounded else max(wanted)
    num_not_finite = sum(not all(map(math.isfinite, curve)) for curve in curves.values())
    return _view(list(finite.values()), limit, extent, sign, num_not_finite)


def point_view(
    values: Sequence[float], *, more_is_better: bool = False, is_bounded: bool = False
) -> VisibleRange | None:
    """Choose the range that shows one value of every job; None without finite values.

    It leaves out values that are not finite and far outliers: values more than three interquartile ranges above the
    upper quartile of the jobs that have not diverged (``FAR``).

    Args:
        more_is_better: Whether higher values are better; then the rule is mirrored.
    """
    sign = -1.0 if more_is_better else 1.0
    finite = [sign * value for value in values if math.isfinite(value)]
    if not finite:
        return None
    low = min(finite)
    far = low + FAR * max(abs(low), 1.0)
    limit = math.inf if is_bounded else _outer_fence([value for value in finite if value <= far])
    extent = max(0.02 * abs(low), 1e-6)
    return _view([[value] for value in finite], limit, extent, sign, len(values) - len(finite))


def _view(
    curves: Sequence[Sequence[float]], limit: float, extent: float, sign: float, num_not_finite: int
) -> VisibleRange:
    """Return the view from the lowest value up to ``limit``, at least ``extent`` high.

    Args:
        curves: Finite values, times ``sign``.
        sign: -1 if higher values are better.
    """
    low = min(map(min, curves))
    high = max(value for curve in curves for value in curve if value <= limit)
    margin = 0.06 * max(high - low, extent)
    ends = sorted((sign * (low - margin), sign * (high + margin)))
    return VisibleRange(
        low=ends[0],
        high=ends[1],
        more_is_better=sign < 0,
        num_outside=sum(max(curve) > limit for curve in curves),
        worst=sign * max(map(max, curves)),
        num_not_finite=num_not_finite,
    )


def _outer_fence(values: Sequence[float]) -> float:
    """Return Tukey's limit of far outliers: three interquartile ranges above the upper quartile."""
    lower, _, upper = statistics.quantiles([*values, *values], n=4, method="inclusive")
    return upper + 3 * (upper - lower)


def curve_figure(history: RunHistory, rows: Iterable[JobTableRow], quantity: Quantity) -> CurveFigure:
    """Draw one curve per job over the share of its own steps, with a line at every rung; the best job is drawn last."""
    evaluated = [job for job in history.jobs.values() if job.evaluations]
    best = history.best
    curves = {job.job: quantity.values_of(job) for job in evaluated}
    view = choose_view(
        curves,
        more_is_better=quantity.more_is_better,
        is_bounded=quantity.is_bounded,
        best=best.job if best is not None else "",
    )
    labels = {row.history.job: row.label for row in rows}
    if view is None:
        return CurveFigure(traces=[], rungs=[], view=None)
    counts: dict[str, int] = {}
    for job in evaluated:
        role = role_of(job, best)
        counts[role] = counts.get(role, 0) + 1
    traces: list[dict[str, Any]] = []
    seen: set[str] = set()
    for job in sorted(evaluated, key=lambda job: _drawing_order(role_of(job, best))):
        role = role_of(job, best)
        traces.append(_curve(job, role, counts[role], labels[job.job], quantity, show_legend=role not in seen))
        seen.add(role)
    return CurveFigure(traces=traces, rungs=_rung_labels(history), view=view)


def curve_data(figure: CurveFigure, title: str, tick_format: str = "") -> dict[str, Any]:
    """Return ``figure`` as data for ``templates/report.js``.

    Args:
        tick_format: Format of its ticks, in d3's syntax; empty for plotly's default.
    """
    return {
        "traces": figure.traces,
        "rungs": figure.rungs,
        "yTitle": html.escape(title),
        "yTickFormat": tick_format,
        "view": [figure.view.low, figure.view.high] if figure.view is not None else None,
    }


def occupancy_figure(history: RunHistory, rows: Iterable[JobTableRow]) -> dict[str, Any]:
    """Draw one horizontal bar for each stay of a job in a slot, grouped by outcome, over the time of work on the run.

    Interruptions are cut out of the axis. If the clock was set back, bars become shorter, but never negative.
    """
    seconds, unit = _time_unit(history.duration_s)
    labels = {row.history.job: row.label for row in rows}
    bars: dict[str, dict[str, Any]] = {}
    num_ranks = max([history.num_ranks, *(stay.rank + 1 for stay in history.occupancy)])
    # A run that was resumed with a different number of ranks has had banks of several sizes.
    num_local = max([history.num_slots // history.num_ranks, *(stay.local_slot + 1 for stay in history.occupancy)])
    has_ranks = num_ranks > 1
    for stay in history.occupancy:
        role = role_of(history.jobs[stay.job], history.best)
        bar = bars.setdefault(role, _empty_bar(role))
        start = history.worked_s(stay.start) / seconds
        end = history.last_seen_at if stay.end is None else stay.end
        length = max(0.0, history.worked_s(end) / seconds - start) if end is not None else 0.0
        bar["base"].append(start)
        bar["x"].append(length)
        lane = _lane(stay.rank, stay.local_slot, has_ranks=has_ranks)
        bar["y"].append(lane)
        bar["text"].append(html.escape(stay.job))
        bar["customdata"].append(
            f"{_hover_name(stay.job, labels[stay.job])}<br>{length:.3g} {unit} {'on' if has_ranks else 'in'} {lane}"
        )
    gaps = [
        (history.worked_s(start) / seconds, f"interrupted for {format_duration(end - start)}")
        for start, end in history.interruptions
    ]
    return {
        "traces": [bars[role] for role in sorted(bars, key=_drawing_order)],
        "xTitle": f"{unit} since the start" + (", interruptions cut out" if gaps else ""),
        "gaps": gaps,
        "lanes": [_lane(rank, slot, has_ranks=has_ranks) for rank in range(num_ranks) for slot in range(num_local)],
    }


def _lane(rank: int, slot: int, *, has_ranks: bool) -> str:
    return f"rank {rank}, slot {slot}" if has_ranks else f"slot {slot}"


def _curve(
    job: JobHistory, role: str, num_alike: int, label: str, quantity: Quantity, *, show_legend: bool
) -> dict[str, Any]:
    values = quantity.values_of(job)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [point.progress for point in job.evaluations],
        "y": [value if math.isfinite(value) else None for value in values],
        "name": f"best: {html.escape(job.job)}" if role == "best" else f"{role} ({format_count(num_alike)})",
        "legendgroup": role,
        "showlegend": show_legend,
        "text": _hover_name(job.job, label),
        "hovertemplate": f"%{{text}}<br>{quantity.hover} after %{{x:.1%}} of its steps<extra></extra>",
        "meta": {"role": role},
    }


def _rung_labels(history: RunHistory) -> list[tuple[float, str, str]]:
    """Return every rung: the share of steps after which jobs were first evaluated for it, a label with this share, and
    a label without."""
    labels = []
    for rung in history.rung_settings:
        outcome = next((found for found in history.rungs if math.isclose(found.progress, rung.progress)), None)
        kept = f"{format_percent(rung.progress)}: {len(outcome.kept)} kept" if outcome is not None else ""
        reached, label = history.fraction_after(rung), kept or describe_rung(rung)
        is_exact = math.isclose(reached, rung.progress)
        labels.append((reached, label if is_exact else f"after {format_percent(reached)}, rung at {label}", label))
    return labels


def _empty_bar(role: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "base": [],
        "x": [],
        "y": [],
        "text": [],
        "customdata": [],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "constraintext": "inside",
        "name": "best" if role == "best" else role,
        "hovertemplate": "%{customdata}<extra></extra>",
        "meta": {"role": role},
    }


def role_of(job: JobHistory, best: JobHistory | None) -> str:
    """Return the role that decides a job's color: its outcome, or ``best``."""
    return "best" if job is best else job.outcome


def sorted_roles(roles: Iterable[str]) -> list[str]:
    """Return the distinct roles in the order in which they are drawn: the best job last, over all others."""
    return sorted(set(roles), key=_drawing_order)


def _drawing_order(role: str) -> tuple[int, str]:
    last = {"completed": len(_DRAWING_ORDER), "best": len(_DRAWING_ORDER) + 1}
    return (last[role] if role in last else _DRAWING_ORDER.index(role) if role in _DRAWING_ORDER else -1, role)


def _hover_name(job: str, label: str) -> str:
    return f"<b>{html.escape(job)}</b>" + (f"<br>{html.escape(label)}" if label else "")


def _time_unit(duration_s: float) -> tuple[float, str]:
    if duration_s < 300:
        return 1.0, "seconds"
    return (60.0, "minutes") if duration_s < 3 * 3600 else (3600.0, "hours")
