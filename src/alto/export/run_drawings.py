"""All figures of a run, for the report and the service's dashboard; ``templates/report.js`` draws them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from alto.export.figures import (
    TRAINING_LOSS,
    VALIDATION_LOSS,
    CurveFigure,
    OccupancyFigure,
    View,
    curve_data,
    curve_figure,
    metric_quantity,
    occupancy_figure,
)
from alto.export.metrics import loss_unit, metric_meaning, metric_name
from alto.export.parallel import parallel_figure
from alto.export.rates import rate_figure
from alto.export.tables import JobTable
from alto.runs import RunHistory

__all__ = ["MetricSection", "RunFigures", "run_figures"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSection:
    """Heading and text of the figure of a metric.

    Attributes:
        id: Id of the figure in a page.
        name: Name of the metric, in words.
        meaning: A sentence about the metric.
        view: The initial view of the figure; None if there is nothing to show.
    """

    id: str
    name: str
    meaning: str
    view: View | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """The figures of a run.

    Attributes:
        validation, train: Curves of the losses.
        metric_sections: One section per metric, in the order of the table's columns.
        parallel, rates: Figures of settings against the best value; None if there is too little data.
        data: All figures by id, as data for ``templates/report.js``.
        opens_logarithmic: Whether the axis of progress is logarithmic at first.
    """

    validation: CurveFigure
    train: CurveFigure
    metric_sections: tuple[MetricSection, ...]
    parallel: Mapping[str, Any] | None
    rates: Mapping[str, Any] | None
    data: Mapping[str, Any]
    opens_logarithmic: bool


def run_figures(history: RunHistory, table: JobTable) -> RunFigures:
    """Return the figures of ``history``, whose job table is ``table``."""
    validation = curve_figure(history, table.rows, VALIDATION_LOSS)
    train = curve_figure(history, table.rows, TRAINING_LOSS)
    quantities = {name: metric_quantity(name) for name in table.metrics}
    metrics = {name: curve_figure(history, table.rows, quantity) for name, quantity in quantities.items()}
    parallel = parallel_figure(history)
    rates = rate_figure(history, table.rows)
    slots = occupancy_figure(history, table.rows)
    unit = loss_unit(history.method)
    return RunFigures(
        validation=validation,
        train=train,
        metric_sections=tuple(
            MetricSection(
                id=f"metric-{index}", name=metric_name(name), meaning=metric_meaning(name), view=metrics[name].view
            )
            for index, name in enumerate(table.metrics)
        ),
        parallel=parallel,
        rates=rates,
        data={
            "parallel": parallel,
            "rates": rates,
            "validation": curve_data(validation, f"validation loss, {unit}"),
            "train": curve_data(train, f"smoothed training loss, {unit}"),
            **{
                f"metric-{index}": curve_data(metrics[name], metric_name(name), quantities[name].tick_format)
                for index, name in enumerate(table.metrics)
            },
            "slots": _slots_data(slots),
        },
        # Early rungs would crowd everything at the left edge of a linear axis.
        opens_logarithmic=any(history.share_after(rung) <= 0.2 for rung in history.rung_settings),
    )


def _slots_data(figure: OccupancyFigure) -> dict[str, Any]:
    title = f"{figure.unit} since the start" + (", interruptions cut out" if figure.gaps else "")
    return {"traces": figure.traces, "xTitle": title, "gaps": figure.gaps, "lanes": figure.lanes}
