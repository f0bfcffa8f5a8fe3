"""Shows the progress of a run in the terminal, and a summary at the end.

Names come from users: escapes are removed from them, and they are drawn as rich ``Text``, which interprets no markup.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.control import Control
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from alto.base import finite
from alto.runs import JobHistory, JournalEntry, RunDir, RunHistory, RunStatus, Stage, events, read_history
from alto.runs.history import Pace
from alto.runs.progress import next_stop, outlook
from alto.spec import LOSS
from alto.views import wording
from alto.views.choice import choice_notes
from alto.views.metrics import describe_best_metrics, describe_test, format_metric, metric_name, short_metric
from alto.views.plain import PlainView, samples_text
from alto.views.tables import JobTable, JobTableRow, job_table, run_notes

GRID_LINES = 3
"""Lines in addition to the rows: the headings, the rule, and the line for what does not fit."""

GAP = 2  # the padding of a cell and the separator that the box draws
BAR_WIDTH = 10
WIDEST_JOB = 24
WIDEST_SETTING = 20
NARROWEST_NOTE = 20
OUTCOME_STYLES = {
    "training": "bold",
    "completed": "cyan",
    "overfitting": "yellow",
    "collapsed": "yellow",
    "diverging": "red",
    "failed": "red",
    "stopped": "magenta",
    "budget": "magenta",
    "underperforming": "dim",
    "pending": "dim",
}
# The order in which columns are dropped on a narrow terminal; a column of priority STAYS is never dropped. Settings and
# metrics are dropped from the last to the first. The best loss and the first metric belong to the checkpoint that is
# kept, so they are dropped after the losses of the latest step.
BAR, NOTE, TRAIN, LATEST, METRIC, SETTING, FIRST_METRIC, STAYS = range(8)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """A column of the table; the columns with the lowest ``priority`` are dropped first."""

    name: str
    cells: Sequence[RenderableType]
    width: int
    priority: tuple[int, int]
    is_number: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobGrid:
    """Rows of the job table, drawn into the available width; in a file no wider than the rows.

    Attributes:
        settings: Short names of the configuration columns.
        notes: Text of the last column for every row.
        note_name: Heading of the last column.
    """

    settings: tuple[str, ...]
    metrics: tuple[str, ...]
    rows: Sequence[JobTableRow]
    notes: Sequence[str]
    note_name: str
    max_rows: int | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns, left_out = _fit(self._columns(), options.max_width)
        notes = max((cell_len(note) for note in self.notes), default=0)
        widths = [max(column.width, notes if column.priority[0] == NOTE else 0) for column in columns]
        needed = sum(widths) + GAP * (len(widths) - 1)
        grid = Table(
            box=box.SIMPLE_HEAD,
            show_edge=False,
            padding=(0, 1, 0, 0),
            pad_edge=False,
            header_style="dim",
            width=options.max_width if console.is_terminal else min(needed, options.max_width),
        )
        for column in columns:
            is_note = column.priority[0] == NOTE
            grid.add_column(
                Text(column.name),
                justify="right" if column.is_number else "left",
                width=None if is_note else column.width,
                ratio=1 if is_note else None,
                no_wrap=True,
                overflow="ellipsis",
            )
        if console.is_terminal and not any(column.priority[0] == NOTE for column in columns):
            grid.add_column("", ratio=1)
        for index, row in enumerate(self._shown):
            grid.add_row(*(column.cells[index] for column in columns), style="bold green" if row.is_best else None)
        yield grid
        if remainder := self._remainder(left_out, options.max_width):
            yield Text(remainder, style="dim", no_wrap=True, overflow="ellipsis")

    @property
    def _shown(self) -> Sequence[JobTableRow]:
        return self.rows if self.max_rows is None else self.rows[: self.max_rows]

    def _columns(self) -> list[_Column]:
        rows = self._shown
        columns = [_text_column("job", [f"{'★' if row.is_best else ' '} {row.job}" for row in rows], widest=WIDEST_JOB)]
        for index, name in enumerate(self.settings):
            cells = [row.settings[index] for row in rows]
            priority = (SETTING, len(self.settings) - index)
            columns.append(_text_column(name, cells, priority=priority, widest=WIDEST_SETTING, is_number=True))
        stages = [Text(row.outcome, style="" if row.is_best else OUTCOME_STYLES.get(row.outcome, "")) for row in rows]
        # As wide as the longest outcome of all jobs, so that columns keep their places when other rows are shown.
        stage_width = max((cell_len(row.outcome) for row in self.rows), default=0)
        columns.append(_Column(name="stage", cells=stages, width=max(5, stage_width), priority=(STAYS, 0)))
        bars = [_bar(row) for row in rows]
        columns.append(_Column(name="", cells=bars, width=BAR_WIDTH, priority=(BAR, 0)))
        losses = {
            "done": ([wording.format_percent(row.progress) for row in rows], STAYS),
            "train": ([_loss(row.history.train_loss) for row in rows], TRAIN),
            "val": ([_loss(row.history.validation_loss) for row in rows], LATEST),
            "best val": ([_loss(finite(row.history.best_validation_loss)) for row in rows], STAYS),
        }
        for name, (cells, level) in losses.items():
            columns.append(_text_column(name, cells, priority=(level, 0), narrowest=6, is_number=True))
        for index, metric in enumerate(self.metrics):
            cells = [format_metric(metric, row.metrics[index]) for row in rows]
            priority = (METRIC if index else FIRST_METRIC, len(self.metrics) - index)
            columns.append(_text_column(short_metric(metric), cells, priority=priority, narrowest=6, is_number=True))
        if any(row.raw_score is not None for row in self.rows):
            columns.append(
                _text_column("score", [row.score for row in rows], priority=(FIRST_METRIC, 0), is_number=True)
            )
        if any(self.notes):
            notes = [Text(note, style="dim") for note in self.notes[: len(rows)]]
            columns.append(_Column(name=self.note_name, cells=notes, width=NARROWEST_NOTE, priority=(NOTE, 0)))
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
    priority: tuple[int, int] = (STAYS, 0),
    narrowest: int = 0,
    widest: int = WIDEST_SETTING,
    is_number: bool = False,
) -> _Column:
    width = min(widest, max(map(cell_len, (name, *cells))))
    return _Column(
        name=name,
        cells=[Text(cell) for cell in cells],
        width=max(narrowest, width),
        priority=priority,
        is_number=is_number,
    )


def _fit(columns: Sequence[_Column], width: int) -> tuple[list[_Column], list[str]]:
    """Return the columns that fit into ``width``, and the names of the other columns."""
    kept = list(columns)
    while sum(column.width for column in kept) + GAP * len(kept) > width:
        least = min(kept, key=lambda column: column.priority)
        if least.priority[0] == STAYS:
            break
        kept.remove(least)
    return kept, [column.name for column in columns if column not in kept and column.name]


def _bar(row: JobTableRow) -> ProgressBar:
    style = "green" if row.is_best else "cyan"
    return ProgressBar(total=1.0, completed=row.progress, width=BAR_WIDTH, complete_style=style, finished_style=style)


def _loss(loss: float | None) -> str:
    return wording.format_loss(loss) if loss is None or math.isfinite(loss) else f"{loss}"


REFRESHES_PER_SECOND = 2
# Lines of the live view above the table, and the line below it for the cursor.
FRAME_LINES = 7
# Jobs that matter most during the run come first; exited jobs are shown by the reason of their exit.
LIVE_ORDER = {"training": 0, "completed": 1, "parked": 2, "pending": 4}
EXITED_ORDER = 3


def open_view(console: Console) -> LiveView | PlainView:
    """Return the live table if ``console`` is a screen that can redraw itself, else plain lines."""
    can_redraw = console.is_interactive and console.file.isatty() and not console.options.ascii_only
    return LiveView(console) if can_redraw else PlainView(console.file)


class LiveView:
    """Redraws the state of a run in place, limited to the size of the terminal.

    A context manager; ``observe`` may be called from any thread. When the context ends, the table disappears, so that
    :func:`final_summary` can replace it; notes on the data stay.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.time) -> None:
        self.history = RunHistory()
        self._console = console
        self._clock = clock
        self._lock = threading.Lock()
        self._paces: dict[str, Pace] = {}  # steps of every job in a slot
        self._announcement = ""
        self._measuring = ""
        self._size = console.size
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
        )

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._live.stop()
        if error is not None and self.history.jobs:
            self._console.print(final_summary(self.history))

    def observe(self, entry: JournalEntry) -> None:
        """Apply one entry of the journal; the next redraw shows it."""
        if isinstance(entry.event, events.MeasuringBegun):  # before the run begins
            self._measuring = wording.describe_measuring(entry.event)
            if not entry.event.is_update:
                self._console.print(Text(self._measuring, style="dim"))
            return
        with self._lock:
            self.history.apply(entry)
            match entry.event:
                case events.JobAdmitted(job=job) | events.JobResumed(job=job):
                    self._paces[job] = Pace()
                case events.WarmupEnded():
                    # After exits, the remaining jobs are faster.
                    self._paces = {job: Pace() for job in self._paces}
            self._measure()
        if not entry.is_replayed:
            self._print(entry.event)

    def _print(self, event: events.Event) -> None:
        """Print lines that stay above the table. Must be called without the lock, which drawing takes too."""
        match event:
            case events.OutOfMemory():
                self._console.print(Text(wording.describe_memory_event(event), style="yellow"))
            case events.KernelsCompiled():
                self._console.print(Text(wording.describe_compiling(event), style="dim"))
            case events.ProfileMeasured():
                self._console.print(Text(wording.describe_profile(event), style="dim"))
            case events.TaskStarted(notes=notes) | events.TaskResumed(notes=notes):
                for note in notes:
                    self._console.print(Text(f"note: {wording.clean(note)}", style="yellow"))

    def show(self, history: RunHistory) -> None:
        """Replace the displayed state with ``history``, a newer state of the same run."""
        with self._lock:
            self.history = history
            in_slots = (job.job for job in history.jobs.values() if job.slot is not None)
            self._paces = {job: self._paces.get(job, Pace()) for job in in_slots}
            self._measure()

    def announce(self, text: str) -> None:
        """Show ``text`` at the top of the view, from now until the view ends."""
        self._announcement = text
        self._live.refresh()

    def _measure(self) -> None:
        now = self.history.last_seen_at
        if now is None:
            return
        for job, pace in self._paces.items():
            pace.note(now, self.history.jobs[job].step)

    def _render(self) -> RenderableType:
        size = self._console.size
        if size != self._size:
            # The terminal has wrapped the lines that were drawn for the old size, so they cannot be overdrawn.
            self._console.control(Control.clear(), Control.home())
            self._size = size
        with self._lock:
            return self._screen(now=self._clock(), height=size.height)

    def _screen(self, *, now: float, height: int) -> RenderableType:
        history = self.history
        announced = [Text(self._announcement, style="bold yellow", overflow="fold")] if self._announcement else []
        if not history.jobs:
            return Group(*announced, Text(self._measuring or "Preparing …", style="dim"))
        table = job_table(history)
        rows = sorted(table.rows, key=lambda row: (not row.is_best, LIVE_ORDER.get(row.outcome, EXITED_ORDER)))
        notes = [row.explanation or self._next_stop(row.history, now) for row in rows]
        best = _best_line(table, history)
        num_more = sum(len(line.wrap(self._console, self._console.size.width)) for line in (best, *announced)) - 1
        return Group(
            *announced,
            Text(wording.clean(history.name), style="bold", no_wrap=True, overflow="ellipsis"),
            Text(" · ".join(wording.describe_task(history.started)), style="dim", no_wrap=True, overflow="ellipsis"),
            *self._progress(now),
            best,
            "",
            JobGrid(
                settings=table.columns,
                metrics=table.metrics,
                rows=rows,
                notes=notes,
                note_name="next / why",
                max_rows=max(1, height - FRAME_LINES - num_more - GRID_LINES),
            ),
        )

    def _progress(self, now: float) -> list[RenderableType]:
        history = self.history
        found = outlook(history, now)
        line = Table.grid(padding=(0, 2), expand=True)
        line.add_column(ratio=1)
        line.add_column(justify="right")
        line.add_row(
            ProgressBar(total=1.0, completed=found.fraction_done, complete_style="cyan", finished_style="green"),
            Text(wording.format_percent(found.fraction_done)),
        )
        facts = [f"{wording.format_duration(history.worked_s(now))} so far"]
        if found.fraction_done < 1.0:
            facts[:0] = wording.describe_outlook(found) or ["time left: after the first evaluations"]
        facts_line = " · ".join([*facts, _samples(history)])
        if cell_len(facts_line) > self._console.size.width:
            facts_line = " · ".join([*facts, f"{wording.format_percent(history.saved_share)} saved"])
        return [line, Text(facts_line, style="dim", no_wrap=True, overflow="ellipsis")]

    def _next_stop(self, job: JobHistory, now: float) -> str:
        """Describe when a job in a slot reaches its next rung or its end; empty if it has ended or not begun."""
        if job.has_ended or not job.step:
            return ""
        stop, num_steps = next_stop(self.history, job)
        if stop == "rung" and num_steps <= 0:
            return "waits for the rung"
        pace = self._paces.get(job.job)
        rate = pace.per_second(now) if pace is not None and job.slot is not None else None
        return f"{stop} in {wording.format_duration(num_steps / rate)}" if rate and num_steps > 0 else ""


def _wall_time(history: RunHistory) -> str:
    """Describe how long the run took, and the part for measuring before its first step."""
    if not history.measuring_s:
        return wording.format_duration(history.duration_s)
    total_s = history.duration_s + history.measuring_s
    return f"{wording.format_duration(total_s)}, including {wording.format_duration(history.measuring_s)} for measuring"


def final_summary(
    history: RunHistory,
    run_dir: str | Path | None = None,
    *,
    max_rows: int | None = 20,
    is_live: bool = True,
    now: float | None = None,
) -> RenderableType:
    """Return the table of jobs, the savings, and the path of the best adapter.

    Args:
        run_dir: Folder of the run, to show the path of the adapter; None leaves it out.
        is_live: Whether a process works on the run, if it is not finished.
        now: Current time in Unix seconds, to show the remaining time of a live run; None leaves it out.
    """
    table = job_table(history)
    status = history.status(is_live=is_live)
    rows = table.rows
    if status is RunStatus.INTERRUPTED:
        rows = tuple(replace(row, outcome=status.value) if row.outcome == Stage.TRAINING else row for row in rows)
    state = "not finished" if status is RunStatus.RUNNING else status.value
    lines: list[RenderableType] = [
        Text.assemble((wording.clean(history.name), "bold"), f" {state} after {_wall_time(history)}"),
        *(Text(f"note: {note}", style="yellow") for note in run_notes(history)),
        "",
        JobGrid(
            settings=table.columns,
            metrics=table.metrics,
            rows=rows,
            notes=[row.explanation for row in rows],
            note_name="why",
            max_rows=max_rows,
        ),
        "",
        _best_line(table, history),
        *(Text(f"note: {wording.clean(note)}", style="yellow") for note in choice_notes(history)),
        Text(_samples(history, with_reasons=True)),
        *map(Text, wording.describe_time(history)),
    ]
    if status is RunStatus.RUNNING and now is not None:
        progress = outlook(history, now)
        lines.append(
            Text(
                " · ".join(
                    [f"{wording.format_percent(progress.fraction_done)} done", *wording.describe_outlook(progress)]
                )
            )
        )
    lines += samples_text(history)
    if run_dir is not None and history.best is not None:
        place, folder = ("adapter", "best") if history.result is not None else ("best checkpoints so far", "jobs")
        lines.append(Text(f"{place}: {wording.clean(Path(run_dir) / folder)}", overflow="fold"))
    return Group(*lines)


def _best_line(table: JobTable, history: RunHistory) -> Text:
    if history.refit is not None:
        tested = [describe_test(history, job) for job in history.jobs.values()]
        measured = "".join(f"; test loss {one}" for one in tested if one)
        return Text(f"{wording.describe_refit(history.refit)}{measured}", overflow="fold")
    best = next((row for row in table.rows if row.is_best), None)
    if best is None:
        return Text("best: no job has a finite validation loss yet", style="dim", overflow="fold")
    label = "best" if history.result is not None else "best so far"
    by = "" if history.metric == LOSS else f" by {metric_name(history.metric)}"
    metrics = describe_best_metrics(history, best.history)
    test = describe_test(history, best.history)
    scoring = wording.describe_scoring(history.finalists, history.scorer, "")  # the notes already report a failure
    chosen = f"; {scoring}" if scoring else ""
    return Text.assemble(
        f"{label}{by}: ",
        (best.job, "bold green"),
        f" with validation loss {wording.format_loss(best.history.best_validation_loss)}",
        f", {metrics}" if metrics else "",
        (f" ({best.label})" if best.label else "", "dim"),
        f"; test loss {test}" if test else "",
        chosen,
        overflow="fold",
    )


def _samples(history: RunHistory, *, with_reasons: bool = False) -> str:
    savings = wording.describe_savings(history, with_reasons=with_reasons)
    return f"{wording.describe_samples_trained(history)}, {savings}"


def watch_run(console: Console, run: RunDir, every_s: float) -> None:
    """Redraw the state of ``run`` from its journal every ``every_s`` seconds until no process works on it any more."""
    with LiveView(console) as view:
        while True:
            is_live = run.is_locked()
            view.show(read_history(run.root))
            if not is_live:
                return
            time.sleep(every_s)
