"""HTML pages that are readable offline and without the project.

Everything is inlined (plotly's own bundle once), and the content security policy of a page forbids every request.
Numbers reach the scripts as JSON in which ``<``, ``>`` and ``&`` are escaped.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from alto.base import replace_file, write_error
from alto.views import metrics, wording

_UNIT = re.compile(r"(?<=\d) (?=(?:%|s|min|h)(?![\w-]))")
"""The space between a number and its unit."""


def render_page(template: str, **context: Any) -> str:
    """Render a template of :mod:`alto.report` as a page, which may include plotly's bundle."""
    return page_environment().get_template(template).render(**context, plotly_js=Markup(plotly_bundle()))


def render_fragment(template: str, **context: Any) -> str:
    """Render a template of :mod:`alto.report` that is a part of a page, such as a notebook's, and runs no script."""
    return page_environment().get_template(template).render(**context)


def page_environment(*packages: str) -> Environment:
    """Return an environment with the templates of ``packages``, then of :mod:`alto.report`; it escapes all text.

    Args:
        packages: Names of packages that have a folder ``templates``.
    """
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in (*packages, "alto.report")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "clean": wording.clean,
        "clean_lines": wording.clean_lines,
        "count": wording.format_count,
        "count_of": wording.format_count_of,
        "duration": wording.format_duration,
        "hours": wording.format_hours,
        "loss": wording.format_loss,
        "money": wording.format_money,
        "setting": wording.format_setting,
        "percent": wording.format_percent,
        "finite": _finite,
        "short_name": wording.short_name,
        "metric": lambda value, name: metrics.format_metric(name, value),
        "metric_name": metrics.metric_name,
        "short_metric": metrics.short_metric,
        "unbroken": _unbroken,
    }
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    return environment


def write_page(path: Path, page: str) -> Path:
    """Write a page to ``path``, in the folder of a run or a queue, atomically.

    Raises:
        RunWriteError: The disk is full or cannot be written; no part of the page is left there.
    """
    try:
        replace_file(path, page)
    except OSError as error:
        remedy = f"free disk space or make the disk writable, then write it with: alto report {path.parent}"
        raise write_error(path, error, remedy) from error
    return path


def timestamp(time: float | None) -> str:
    """Format Unix seconds as a date and time."""
    return datetime.fromtimestamp(time, tz=UTC).strftime("%d %B %Y, %H:%M UTC") if time is not None else "never"


def _unbroken(html: Markup) -> Markup:
    """Return a part of a page in which no line ends between a number and its unit."""
    return Markup(_UNIT.sub("\u00a0", html))


def _finite(value: Any) -> Any:
    """Return ``value`` for a sorting attribute: empty if it is not a finite number, so that it sorts last."""
    return "" if value is None or value != value or value in (float("inf"), float("-inf")) else value


def plotly_bundle() -> str:
    """Return the script of plotly.js."""
    # Importing plotly is slow, so only functions that write a page do it.
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())
