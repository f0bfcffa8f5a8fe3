"""The job table, fitted to the size of the terminal; a line names the rows and columns that do not fit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from alto.export.metrics import format_metric, short_metric
from alto.export.tables import JobRow
from alto.export.wording import format_loss, format_share

__all__ = ["GRID_LINES", "JobGrid"]

GRID_LINES = 3
"""Lines besides the rows: the headings, the rule, and the line for what does not fit."""

GAP = 2  # the padding of a cell and the separator that the box draws
BAR_WIDTH = 10
WIDEST_JOB = 24
WIDEST_SETTING = 20
NARROWEST_NOTE = 20
OUTCOME_STYLES = {
    "training": "bold",
    "completed": "cyan",
    "overfitting": "yellow",
    "diverging": "red",
    "failed": "red",
    "stopped": "magenta",
    "budget": "magenta",
    "underperforming": "dim",
    "pending": "dim",
}
# The order in which columns are dropped on a narrow terminal; a column of worth STAYS is never dropped. Settings and
# metrics are dropped from the last to the first. The best loss and the first metric belong to the checkpoint that is
# kept, so they are dropped after the losses of the latest step.
BAR, NOTE, TRAIN, LATEST, METRIC, SETTING, FIRST_METRIC, STAYS = range(8)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """A column of the table; the columns with the lowest ``worth`` are dropped first."""

    name: str
    cells: Sequence[RenderableType]
    width: int
    worth: tuple[int, int]
    is_number: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobGrid:
    """Rows of the job table, drawn into the available width.

    Attributes:
        settings: Short names of the configuration columns.
        metrics: Names of the metrics that have columns.
        rows: Jobs, in the order in which they are drawn.
        notes: Text of the last column for every row.
        note_name: Heading of the last column.
        max_rows: Largest number of rows to draw; None draws all.
    """

    settings: tuple[str, ...]
    metrics: tuple[str, ...]
    rows: Sequence[JobRow]
    notes: Sequence[str]
    note_name: str
    max_rows: int | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns, left_out = _fit(self._columns(), options.max_width)
        grid = Table(
            box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim", expand=True
        )
        for column in columns:
            is_note = column.worth[0] == NOTE
            grid.add_column(
                Text(column.name),
                justify="right" if column.is_number else "left",
                width=None if is_note else column.width,
                ratio=1 if is_note else None,
                no_wrap=True,
                overflow="ellipsis",
            )
        if not any(column.worth[0] == NOTE for column in columns):
            grid.add_column("", ratio=1)
        for index, row in enumerate(self._shown):
            grid.add_row(*(column.cells[index] for column in columns), style="bold green" if row.is_best else None)
        yield grid
        if remainder := self._remainder(left_out, options.max_width):
            yield Text(remainder, style="dim", no_wrap=True, overflow="ellipsis")

    @property
    def _shown(self) -> Sequence[JobRow]:
        return self.rows if self.max_rows is None else self.rows[: self.max_rows]

    def _columns(self) -> list[_Column]:
        rows = self._shown
        columns = [_text_column("job", [f"{'★' if row.is_best else ' '} {row.job}" for row in rows], widest=WIDEST_JOB)]
        for index, name in enumerate(self.settings):
            cells = [row.settings[index] for row in rows]
            worth = (SETTING, len(self.settings) - index)
            columns.append(_text_column(name, cells, worth=worth, widest=WIDEST_SETTING, is_number=True))
        stages = [Text(row.outcome, style="" if row.is_best else OUTCOME_STYLES.get(row.outcome, "")) for row in rows]
        # As wide as the longest outcome of all jobs, so that columns keep their places when other rows are shown.
        stage_width = max((cell_len(row.outcome) for row in self.rows), default=0)
        columns.append(_Column(name="stage", cells=stages, width=max(5, stage_width), worth=(STAYS, 0)))
        bars = [_bar(row) for row in rows]
        columns.append(_Column(name="", cells=bars, width=BAR_WIDTH, worth=(BAR, 0)))
        losses = {
            "done": ([format_share(row.progress) for row in rows], STAYS),
            "train": ([_loss(row.train_loss) for row in rows], TRAIN),
            "val": ([_loss(row.validation_loss) for row in rows], LATEST),
            "best val": ([_loss(_finite(row.best_validation_loss)) for row in rows], STAYS),
        }
        for name, (cells, worth_of) in losses.items():
            columns.append(_text_column(name, cells, worth=(worth_of, 0), narrowest=6, is_number=True))
        for index, metric in enumerate(self.metrics):
            cells = [format_metric(metric, row.metrics[index]) for row in rows]
            worth = (METRIC if index else FIRST_METRIC, len(self.metrics) - index)
            columns.append(_text_column(short_metric(metric), cells, worth=worth, narrowest=6, is_number=True))
        if any(row.raw_score is not None for row in self.rows):
            columns.append(_text_column("score", [row.score for row in rows], worth=(FIRST_METRIC, 0), is_number=True))
        if any(self.notes):
            notes = [Text(note, style="dim") for note in self.notes[: len(rows)]]
            columns.append(_Column(name=self.note_name, cells=notes, width=NARROWEST_NOTE, worth=(NOTE, 0)))
        return columns

    def _remainder(self, left_out: Sequence[str], width: int) -> str:
        parts = []
        if hidden := self.rows[len(self._shown) :]:
            counts = Counter(row.outcome for row in hidden)
            kinds = ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common())
            parts.append(f"… and {len(hidden)} more ({kinds})")
        if left_out:
            parts.append(f"hidden columns: {', '.join(left_out)}")
        text, advice = " · ".join(parts), " (widen the terminal)"
        return text + advice if left_out and cell_len(text + advice) <= width else text


def _text_column(
    name: str,
    cells: Sequence[str],
    *,
    worth: tuple[int, int] = (STAYS, 0),
    narrowest: int = 0,
    widest: int = WIDEST_SETTING,
    is_number: bool = False,
) -> _Column:
    width = min(widest, max(map(cell_len, (name, *cells))))
    return _Column(
        name=name, cells=[Text(cell) for cell in cells], width=max(narrowest, width), worth=worth, is_number=is_number
    )


def _fit(columns: Sequence[_Column], width: int) -> tuple[list[_Column], list[str]]:
    """Return the columns that fit into ``width``, and the names of the other columns."""
    kept = list(columns)
    while sum(column.width for column in kept) + GAP * len(kept) > width:
        least = min(kept, key=lambda column: column.worth)
        if least.worth[0] == STAYS:
            break
        kept.remove(least)
    return kept, [column.name for column in columns if column not in kept and column.name]


def _bar(row: JobRow) -> ProgressBar:
    style = "green" if row.is_best else "cyan"
    return ProgressBar(total=1.0, completed=row.progress, width=BAR_WIDTH, complete_style=style, finished_style=style)


def _loss(loss: float | None) -> str:
    return format_loss(loss) if loss is None or math.isfinite(loss) else f"{loss}"


def _finite(loss: float) -> float | None:
    """Return a job's best loss; None if there is none yet, or no validation."""
    return loss if math.isfinite(loss) else None
