"""Shows two finished runs side by side, in the terminal and as a page."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from alto.base import replace_file
from alto.errors import RunWriteError
from alto.report.figures import CurveFigure, choose_view, curve_data
from alto.report.pages import render_page
from alto.runs import RunHistory, read_history
from alto.views import wording
from alto.views.metrics import loss_unit
from alto.views.tables import job_table

_ROLES = ("first", "second")
"""The role of each run's curve, which decides its colour."""


def comparison_table(
    run_dirs: tuple[str, str],
    facts: Mapping[str, tuple[Any, Any]],
    settings: Mapping[str, tuple[Any, Any]],
    *,
    same_data: bool | None,
    same_validation: bool | None,
    same_loss: bool,
) -> RenderableType:
    """Return a table of the facts of two runs, then of the settings in which their best jobs differ.

    All arguments are attributes of :class:`alto.results.RunComparison`.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in _short_names(run_dirs):
        table.add_column(name, justify="right", overflow="fold")
    for name, values in facts.items():
        table.add_row(_shown_name(name), *(_format(name, value) for value in values))
    if settings:
        table.add_section()
    for key, values in settings.items():
        table.add_row(f"best job: {wording.clean(wording.short_name(key))}", *map(wording.format_setting, values))
    notes = _warnings(settings, same_data=same_data, same_validation=same_validation, same_loss=same_loss)
    return Group(table, *map(Text, notes))


def write_comparison(
    path: Path,
    run_dirs: tuple[str, str],
    facts: Mapping[str, tuple[Any, Any]],
    settings: Mapping[str, tuple[Any, Any]],
    *,
    same_data: bool | None,
    same_validation: bool | None,
    same_loss: bool,
) -> Path:
    """Write the comparison as one self-contained page, with the validation curves of both best jobs and their
    generations for the prompts that both runs sampled.

    Args:
        run_dirs, facts, settings, same_data, same_validation, same_loss: See :func:`comparison_table`.

    Raises:
        RunNotFoundError, RunError: The journal of a run is gone, or damaged.
        RunWriteError: The file cannot be written.
    """
    histories = [read_history(run_dir) for run_dir in run_dirs]
    names = _short_names(run_dirs)
    figure = _curves(histories, names)
    units = {loss_unit(history.method) for history in histories}
    title = f"validation loss, {units.pop()}" if len(units) == 1 else "validation loss"
    page = render_page(
        "compare.html.jinja",
        names=names,
        run_dirs=run_dirs,
        warnings=_warnings(settings, same_data=same_data, same_validation=same_validation, same_loss=same_loss),
        facts=[(_shown_name(name), [_format(name, value) for value in values]) for name, values in facts.items()],
        settings=[(key, list(map(wording.format_setting, values))) for key, values in settings.items()],
        validation=figure,
        samples=_common_samples(histories),
        figures={"validation": curve_data(figure, title)},
    )
    try:
        replace_file(path, page)
    except OSError as error:
        raise RunWriteError(
            f"html: expected a writable file, found {path} ({error.strerror}); choose another file"
        ) from error
    return path


def _curves(histories: Sequence[RunHistory], names: Sequence[str]) -> CurveFigure:
    """Draw the validation loss of the best job of each run over the share of its steps."""
    traces: list[dict[str, Any]] = []
    curves: dict[str, list[float]] = {}
    for role, name, history in zip(_ROLES, names, histories, strict=True):
        best = history.best
        if best is None or not best.evaluations:
            continue
        losses = [point.validation_loss for point in best.evaluations]
        curves[role] = losses
        label = next(row.label or row.job for row in job_table(history).rows if row.is_best)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": [point.progress for point in best.evaluations],
                "y": [loss if math.isfinite(loss) else None for loss in losses],
                "name": f"{html.escape(name)}: {html.escape(wording.clean(best.job))}",
                "text": f"<b>{html.escape(name)}</b><br>{html.escape(label)}",
                "hovertemplate": "%{text}<br>loss %{y:.4f} after %{x:.1%} of its steps<extra></extra>",
                "meta": {"role": role},
            }
        )
    return CurveFigure(traces=traces, rungs=[], view=choose_view(curves))


def _common_samples(histories: Sequence[RunHistory]) -> list[dict[str, Any]]:
    """Return the prompts that both runs sampled, with the text of each run's best adapter."""
    first, second = ({sample.prompt: sample for sample in history.samples} for history in histories)
    return [
        {
            "prompt": prompt,
            "reference": sample.reference,
            "base": sample.base,
            "texts": [next(iter(one.adapters.values()), "") for one in (sample, second[prompt])],
        }
        for prompt, sample in first.items()
        if prompt in second
    ]


def _warnings(
    settings: Mapping[str, tuple[Any, Any]],
    *,
    same_data: bool | None,
    same_validation: bool | None,
    same_loss: bool,
) -> list[str]:
    found = []
    if same_validation is False:
        found.append(
            "The runs were validated on different rows, or on different tokens of the same rows: their losses cannot "
            "be compared."
        )
    elif same_validation and same_data is False:
        found.append("The runs were trained on different rows, but validated on the same rows.")
    if same_validation is None:
        found.append(
            "The journal of a run does not record its validation rows: it is unknown whether the losses can be "
            "compared."
        )
    if not same_loss:
        found.append(
            "The best jobs compute different losses, because their methods or the settings of these differ: the losses "
            "cannot be compared."
        )
    if not settings:
        found.append("The best jobs have the same configuration.")
    return found


def _short_names(run_dirs: Sequence[str]) -> list[str]:
    """Return the names of the folders; if they are equal, with their parent folders."""
    names = [wording.clean(Path(run_dir).name) for run_dir in run_dirs]
    return names if len(set(names)) == len(names) else [wording.short_path(run_dir) for run_dir in run_dirs]


def _shown_name(name: str) -> str:
    return "duration" if name == "seconds" else wording.clean(name)


def _format(name: str, value: Any) -> str:
    if name == "seconds":
        return wording.format_duration(value)
    if name == "samples saved":
        return wording.format_percent(value)
    if isinstance(value, float):
        return wording.format_loss(value)
    return f"{value:,}" if isinstance(value, int) else wording.format_setting(value)
