"""Progress of a run in the terminal, and its summary at the end.

Names come from users: they are cleaned of escapes and drawn as rich ``Text``, which reads no markup.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from alto.export.plain import PlainView
from alto.export.tables import JobRow, JobTable, exit_totals, job_table
from alto.export.wording import clean, format_count, format_duration, format_loss, format_share
from alto.runs import RunHistory

__all__ = ["LiveView", "PlainView", "final_summary"]

REFRESHES_PER_SECOND = 2
# Lines of the live view that are not rows of jobs: header, progress, best, blank lines, table head, "… and more".
FIXED_LINES = 12
WIDTH_FOR_REASONS = 110
OUTCOME_STYLES = {
    "training": "bold",
    "completed": "cyan",
    "overfitting": "yellow",
    "diverging": "red",
    "failed": "red",
    "stopped": "magenta",
    "underperforming": "dim",
    "pending": "dim",
}
# Jobs that matter most while the run goes on come first; exits have no stage of their own here.
LIVE_ORDER = {"training": 0, "completed": 1, "parked": 2, "pending": 4}
EXITED_ORDER = 3


class LiveView:
    """Redraws the state of a run in place, as far as the terminal's height allows.

    A context manager; ``observe`` may be called from any thread. What it drew disappears when it is left, so that
    :func:`final_summary` can take its place.

    Attributes:
        history: The run as far as it was observed.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.time) -> None:
        self.history = RunHistory()
        self._console = console
        self._clock = clock
        self._lock = threading.Lock()
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
        )

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def observe(self, event: Mapping[str, Any]) -> None:
        """Fold in one event of the journal; the next redraw shows it."""
        with self._lock:
            self.history.apply(event)

    def _render(self) -> RenderableType:
        with self._lock:
            return _live_screen(self.history, now=self._clock(), height=self._console.size.height)


def final_summary(
    history: RunHistory, run_dir: str | Path | None = None, *, max_rows: int | None = 20
) -> RenderableType:
    """The table of jobs, what was saved, and where the best adapter lies.

    Args:
        history: A run, finished or not.
        run_dir: Its folder; without it the summary does not say where the adapter lies.
        max_rows: Rows shown at most, best first; None shows all.
    """
    table = job_table(history)
    state = "finished" if history.result is not None else "not finished"
    lines: list[RenderableType] = [
        Text.assemble((clean(history.name), "bold"), f" {state} after {format_duration(history.duration_s)}"),
        "",
        _job_grid(table, table.rows, max_rows=max_rows),
        "",
        _best_line(table, history),
        Text(f"{_samples(history)} ({_saved_by_reason(history)})" if history.samples_saved else _samples(history)),
    ]
    if run_dir is not None:
        lines += _places(history, Path(run_dir))
    return Group(*lines)


def _live_screen(history: RunHistory, *, now: float, height: int) -> RenderableType:
    if not history.jobs:
        return Text("Preparing …", style="dim")
    table = job_table(history)
    rows = sorted(table.rows, key=lambda row: (not row.is_best, LIVE_ORDER.get(row.outcome, EXITED_ORDER)))
    return Group(
        _header(history),
        _progress(history, now=now),
        _best_line(table, history),
        "",
        _job_grid(table, rows, max_rows=max(1, height - FIXED_LINES)),
    )


def _header(history: RunHistory) -> RenderableType:
    settings = history.settings
    facts = [clean(settings[key]) for key in ("method", "model", "dataset") if key in settings]
    if "num_train" in settings:
        facts.append(f"{settings['num_train']} rows to train, {settings.get('num_validation', 0)} to validate")
    text = Text.assemble((clean(history.name), "bold"), "\n", (" · ".join(facts), "dim"), overflow="ellipsis")
    text.no_wrap = True
    return text


def _progress(history: RunHistory, *, now: float) -> RenderableType:
    elapsed_s = max(0.0, now - history.started_at) if history.started_at is not None else 0.0
    parts = [_samples(history), format_duration(elapsed_s)]
    left = history.samples_budgeted - history.samples_trained - history.samples_saved
    if history.samples_trained and left > 0:
        # Jobs that will yet exit make it shorter, and how many nobody knows.
        parts.append(f"at most {format_duration(elapsed_s * left / history.samples_trained)} left")
    line = Table.grid(padding=(0, 2), expand=True)
    line.add_column(ratio=1)
    line.add_column(justify="right")
    line.add_row(
        ProgressBar(total=1.0, completed=history.settled_share, complete_style="cyan", finished_style="green"),
        Text(format_share(history.settled_share)),
    )
    return Group(line, Text(" · ".join(parts), style="dim", no_wrap=True, overflow="ellipsis"))


def _best_line(table: JobTable, history: RunHistory) -> Text:
    best = next((row for row in table.rows if row.is_best), None)
    if best is None:
        return Text("best: no job has a finite validation loss yet", style="dim")
    label = "best" if history.result is not None else "best so far"
    return Text.assemble(
        f"{label}: ",
        (best.job, "bold green"),
        f" with validation loss {format_loss(best.best_validation_loss)}",
        (f" ({best.label})", "dim"),
        no_wrap=True,
        overflow="ellipsis",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobGrid:
    """The job table, as wide as the console: where there is no room for reasons they are left out."""

    columns: tuple[str, ...]
    rows: tuple[JobRow, ...]
    num_hidden: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        has_reasons = options.max_width >= WIDTH_FOR_REASONS
        grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, expand=True, header_style="dim")
        grid.add_column("job", no_wrap=True)
        for column in self.columns:
            grid.add_column(Text(column), justify="right", no_wrap=True)
        grid.add_column("stage", no_wrap=True)
        for column in ("done", "train", "val", "best val"):
            grid.add_column(column, justify="right", no_wrap=True)
        if has_reasons:
            grid.add_column("why", ratio=1, no_wrap=True, overflow="ellipsis")
        for row in self.rows:
            cells = _cells(row)
            grid.add_row(*(cells if has_reasons else cells[:-1]), style="bold green" if row.is_best else None)
        yield grid
        if self.num_hidden:
            yield Text(f"… and {self.num_hidden} more", style="dim")


def _job_grid(table: JobTable, rows: Sequence[JobRow], *, max_rows: int | None) -> _JobGrid:
    shown = tuple(rows if max_rows is None else rows[:max_rows])
    return _JobGrid(columns=table.columns, rows=shown, num_hidden=len(rows) - len(shown))


def _cells(row: JobRow) -> list[Text]:
    best = format_loss(row.best_validation_loss) if math.isfinite(row.best_validation_loss) else "–"
    return [
        Text(f"★ {row.job}" if row.is_best else f"  {row.job}"),
        *(Text(setting) for setting in row.settings),
        Text(row.outcome, style="" if row.is_best else OUTCOME_STYLES.get(row.outcome, "")),
        Text(format_share(row.progress)),
        Text(format_loss(row.train_loss)),
        Text(format_loss(row.validation_loss)),
        Text(best),
        Text(row.explanation, style="dim"),
    ]


def _samples(history: RunHistory) -> str:
    return (
        f"{format_count(history.samples_trained)} of {format_count(history.samples_budgeted)} samples trained, "
        f"{format_share(history.saved_share)} saved"
    )


def _saved_by_reason(history: RunHistory) -> str:
    totals = [total for total in exit_totals(history) if total.samples_saved]
    return ", ".join(f"{clean(total.outcome)} {format_share(total.share)}" for total in totals)


def _places(history: RunHistory, run_dir: Path) -> list[RenderableType]:
    places: list[RenderableType] = []
    if history.result is not None and history.best is not None:
        places.append(Text(f"adapter: {clean(run_dir / 'best')}", overflow="fold"))
    else:
        places.append(Text(f"best checkpoints so far: {clean(run_dir / 'jobs')}", overflow="fold"))
    return places
