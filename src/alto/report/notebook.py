"""Shows a run in a notebook: the chosen job, the validation curves and the table of jobs.

Everything is HTML and SVG without scripts, so that untrusted notebooks, and viewers without a kernel, show it too.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from typing import Any

from alto.report.figures import VALIDATION_LOSS, CurveFigure, VisibleRange, curve_figure
from alto.report.pages import render_fragment
from alto.runs import RunHistory
from alto.views.choice import choice_notes
from alto.views.metrics import describe_test, loss_unit
from alto.views.tables import job_table
from alto.views.wording import describe_refit, describe_task, format_percent

_MAX_ROWS = 12
_WIDTH, _HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 16, 34
_NUM_TICKS = 5


def result_html(history: RunHistory, run_dir: str) -> str:
    """Return a finished run as a fragment of a page."""
    table = job_table(history)
    figure = curve_figure(history, table.rows, VALIDATION_LOSS)
    return render_fragment(
        "notebook.html.jinja",
        history=history,
        subtitle=describe_task(history.started),
        refit="" if history.refit is None else describe_refit(history.refit),
        notes=choice_notes(history),
        table=table,
        rows=table.rows[:_MAX_ROWS],
        tested="" if history.best is None else describe_test(history, history.best),
        drawing=None if figure.view is None else _drawing(figure, figure.view),
        loss_unit=loss_unit(history.method),
        run_dir=run_dir,
    )


def _drawing(figure: CurveFigure, view: VisibleRange) -> dict[str, Any]:
    """Return curves in pixels, split where values are missing, with ticks, rungs, a legend and a note on the view."""
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x_of(progress: float) -> float:
        return round(_LEFT + progress * (right - _LEFT), 1)

    def y_of(value: float) -> float:
        # A point far outside of the view only has to be outside: huge numbers are not valid coordinates.
        fraction = min(max((value - view.low) / (view.high - view.low), -1.0), 2.0)
        return round(bottom - fraction * (bottom - _TOP), 1)

    fractions = [index / (_NUM_TICKS - 1) for index in range(_NUM_TICKS)]
    curves = [
        {
            "role": trace["meta"]["role"],
            "label": html.unescape(trace["text"].replace("<b>", "").replace("</b>", "").replace("<br>", ": ")),
            "pieces": [" ".join(f"{x_of(x)},{y_of(y)}" for x, y in piece) for piece in _pieces(trace["x"], trace["y"])],
        }
        for trace in figure.traces
    ]
    legend = [trace for trace in reversed(figure.traces) if trace["showlegend"]]  # the best job is drawn last
    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "left": _LEFT,
        "right": right,
        "top": _TOP,
        "bottom": bottom,
        "curves": curves,
        "x_ticks": [(x_of(fraction), format_percent(fraction)) for fraction in fractions],
        "y_ticks": [(y_of(value), label) for value, label in _round_ticks(view.low, view.high)],
        "rungs": [x_of(progress) for progress, *_ in figure.rungs],
        "legend": [(html.unescape(trace["name"]), trace["meta"]["role"]) for trace in legend],
        "note": view.left_out,
    }


def _round_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Return two to six round values from ``low`` to ``high``, with their labels."""
    rough = (high - low) / _NUM_TICKS
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= rough)
    decimals = max(0, -math.floor(math.log10(step)))
    values = [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return [(value, f"{value:.{decimals}f}" if step < 1e5 else f"{value:.4g}") for value in values]


def _pieces(xs: Sequence[float], ys: Sequence[Any]) -> Iterator[list[tuple[float, float]]]:
    """Yield runs of consecutive points that have a value."""
    piece: list[tuple[float, float]] = []
    for x, y in zip(xs, ys, strict=True):
        if y is not None:
            piece.append((x, y))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece
