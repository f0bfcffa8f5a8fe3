"""``report.html``: one page that tells a run, readable offline and without the project.

Everything is inlined (plotly's own bundle once), and the page forbids itself every request by its content security
policy. Numbers reach the scripts as JSON in which ``<``, ``>`` and ``&`` are escaped.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from alto.export.figures import LossFigure, loss_figure, occupancy_figure
from alto.export.tables import exit_totals, job_table
from alto.export.wording import (
    clean,
    describe_rungs,
    format_count,
    format_duration,
    format_loss,
    format_setting,
    format_share,
    tidy_config,
    varying_keys,
)
from alto.runs import RunHistory, Stage, read_history

__all__ = ["write_report"]

REPORT_NAME = "report.html"
RUNGS = ("early_exit", "rungs")


def write_report(run_dir: str | Path) -> Path:
    """Write ``report.html`` into ``run_dir`` from its journal and return its path; the run may be unfinished.

    Raises:
        RunNotFoundError: ``run_dir`` holds no journal.
        RunError: The journal is damaged before its last line.
    """
    run_dir = Path(run_dir)
    page = render_report(read_history(run_dir), run_dir)
    path = run_dir / REPORT_NAME
    # A reader never sees half a page.
    unfinished = path.with_suffix(".html.partial")
    unfinished.write_text(page, encoding="utf-8")
    unfinished.replace(path)
    return path


def render_report(history: RunHistory, run_dir: Path) -> str:
    """The report of ``history`` as HTML; ``run_dir`` only names where the adapters lie."""
    environment = Environment(
        loader=PackageLoader("alto.export"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "clean": clean,
        "count": format_count,
        "duration": format_duration,
        "loss": format_loss,
        "setting": format_setting,
        "share": format_share,
        "finite": _finite,
    }
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    return environment.get_template("report.html.jinja").render(**_context(history, run_dir))


def _context(history: RunHistory, run_dir: Path) -> dict[str, Any]:
    table = job_table(history)
    validation = loss_figure(history, table.rows, lambda point: point.validation_loss)
    train = loss_figure(history, table.rows, lambda point: point.train_ema)
    stays, time_unit = occupancy_figure(history, table.rows)
    return {
        "history": history,
        "table": table,
        "best": next((row for row in table.rows if row.is_best), None),
        "is_finished": history.result is not None,
        "num_open": sum(not job.has_ended for job in history.jobs.values()),
        "num_exited": sum(job.stage is Stage.EXITED for job in history.jobs.values()),
        "num_completed": sum(job.stage is Stage.COMPLETED for job in history.jobs.values()),
        "totals": exit_totals(history),
        "settings": _settings(history),
        "shared": _shared_settings(history),
        "adapter_dir": str(run_dir / "best"),
        "jobs_dir": str(run_dir / "jobs"),
        "written_at": _timestamp(history.last_seen_at),
        "validation": validation,
        "train": train,
        "figures": {
            "validation": _loss_data(validation, "validation loss, nats per token"),
            "train": _loss_data(train, "smoothed training loss, nats per token"),
            "slots": {"traces": stays, "xTitle": f"{time_unit} since the start", "numSlots": history.num_slots},
        },
        # Rungs early in a run crowd all that happens into the left edge of a linear axis.
        "opens_logarithmic": any(rung.progress <= 0.2 for rung in history.rung_settings),
        "plotly_js": Markup(_plotly_bundle()),
    }


def _loss_data(figure: LossFigure, title: str) -> dict[str, Any]:
    view = [figure.view.low, figure.view.high] if figure.view is not None else None
    return {"traces": figure.traces, "yTitle": title, "view": view}


def _settings(history: RunHistory) -> list[tuple[str, Any]]:
    """Name and value of every setting of the task, nested ones dotted, as the journal has them."""
    flat: list[tuple[str, Any]] = []
    for key, value in history.settings.items():
        if isinstance(value, dict):
            flat += [(f"{key}.{inner}", item) for inner, item in value.items() if (key, inner) != RUNGS]
            if key == RUNGS[0]:
                flat.append((".".join(RUNGS), describe_rungs(history.rung_settings) or None))
        else:
            flat.append((key, value))
    return flat


def _shared_settings(history: RunHistory) -> list[tuple[str, Any]]:
    """What all jobs have in common."""
    configs = [tidy_config(job.config) for job in history.jobs.values()]
    varying = set(varying_keys(configs))
    return [(key, value) for key, value in configs[0].items() if key not in varying] if configs else []


def _timestamp(time: float | None) -> str:
    return datetime.fromtimestamp(time, tz=UTC).strftime("%d %B %Y, %H:%M UTC") if time is not None else "never"


def _finite(value: Any) -> Any:
    """``value`` for a sorting attribute: empty when it is no finite number, so that it sorts last."""
    return "" if value is None or value != value or value in (float("inf"), float("-inf")) else value


def _plotly_bundle() -> str:
    # Importing plotly takes a moment that only those who write a report should spend.
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())
