"""Shows the progress of a run in the terminal, and a summary at the end.

Names come from users: escapes are removed from them, and they are drawn as rich ``Text``, which interprets no markup.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from alto.export.choice import choice_notes
from alto.export.job_grid import GRID_LINES, JobGrid
from alto.export.metrics import describe_metrics, describe_test, metric_name
from alto.export.plain import PlainView
from alto.export.samples import samples_text
from alto.export.tables import JobTable, job_table, run_notes
from alto.export.wording import (
    clean,
    describe_compiling,
    describe_measuring,
    describe_memory_event,
    describe_outlook,
    describe_profile,
    describe_refit,
    describe_savings,
    describe_scoring,
    describe_task,
    describe_time,
    format_count,
    format_duration,
    format_loss,
    format_share,
)
from alto.runs import JobHistory, JournalEntry, RunHistory, RunStatus, Stage
from alto.runs.events import (
    Event,
    JobAdmitted,
    JobResumed,
    KernelsCompiled,
    MeasuringBegun,
    OutOfMemory,
    ProfileMeasured,
    RefitFact,
    TaskResumed,
    TaskStarted,
    WarmupEnded,
)
from alto.runs.pace import Pace
from alto.runs.progress import exit_totals, next_stop, outlook
from alto.spec.metric import LOSS

__all__ = ["LiveView", "final_summary", "open_view"]

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

    Attributes:
        history: The run, up to the latest observed entry.
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
        if isinstance(entry.event, MeasuringBegun):  # before the run begins
            self._measuring = describe_measuring(entry.event)
            if not entry.event.is_update:
                self._console.print(Text(self._measuring, style="dim"))
            return
        with self._lock:
            self.history.apply(entry)
            match entry.event:
                case JobAdmitted(job=job) | JobResumed(job=job):
                    self._paces[job] = Pace()
                case WarmupEnded():
                    # After exits, the remaining jobs are faster.
                    self._paces = {job: Pace() for job in self._paces}
            self._measure()
        if not entry.is_replayed:
            self._print(entry.event)

    def _print(self, event: Event) -> None:
        """Print lines that stay above the table. Must be called without the lock, which drawing takes too."""
        match event:
            case OutOfMemory():
                self._console.print(Text(describe_memory_event(event), style="yellow"))
            case KernelsCompiled():
                self._console.print(Text(describe_compiling(event), style="dim"))
            case ProfileMeasured():
                self._console.print(Text(describe_profile(event), style="dim"))
            case TaskStarted(notes=notes) | TaskResumed(notes=notes):
                for note in notes:
                    self._console.print(Text(f"note: {clean(note)}", style="yellow"))

    def show(self, history: RunHistory) -> None:
        """Replace the shown state by ``history``, a newer state of the same run."""
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
        notes = [row.explanation or self._next_stop(history.jobs[row.job_id], now) for row in rows]
        best = _best_line(table, history)
        num_more = sum(len(line.wrap(self._console, self._console.size.width)) for line in (best, *announced)) - 1
        return Group(
            *announced,
            *_header(history),
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
            ProgressBar(total=1.0, completed=found.share_done, complete_style="cyan", finished_style="green"),
            Text(format_share(found.share_done)),
        )
        facts = [f"{format_duration(history.worked_s(now))} so far"]
        if found.share_done < 1.0:
            facts[:0] = describe_outlook(found) or ["time left: after the first evaluations"]
        facts_line = " · ".join([*facts, _samples(history)])
        if cell_len(facts_line) > self._console.size.width:
            facts_line = " · ".join([*facts, f"{format_share(history.saved_share)} saved"])
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
        return f"{stop} in {format_duration(num_steps / rate)}" if rate and num_steps > 0 else ""


def _wall_time(history: RunHistory) -> str:
    """Describe how long the run took, and the part for measuring before its first step."""
    if not history.measuring_s:
        return format_duration(history.duration_s)
    total_s = history.duration_s + history.measuring_s
    return f"{format_duration(total_s)}, including {format_duration(history.measuring_s)} for measuring"


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
        history: A run, finished or not.
        run_dir: Folder of the run, to show the path of the adapter; None leaves it out.
        max_rows: Largest number of rows to show, best first; None shows all.
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
        Text.assemble((clean(history.name), "bold"), f" {state} after {_wall_time(history)}"),
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
        *(Text(f"note: {clean(note)}", style="yellow") for note in choice_notes(history)),
        Text(f"{_samples(history)} ({_saved_by_reason(history)})" if history.samples_saved else _samples(history)),
        *map(Text, describe_time(history)),
    ]
    if status is RunStatus.RUNNING and now is not None:
        found = outlook(history, now)
        lines.append(Text(" · ".join([f"{format_share(found.share_done)} done", *describe_outlook(found)])))
    lines += samples_text(history)
    if run_dir is not None and history.best is not None:
        lines.append(_place(history, Path(run_dir)))
    return Group(*lines)


def _header(history: RunHistory) -> list[RenderableType]:
    return [
        Text(clean(history.name), style="bold", no_wrap=True, overflow="ellipsis"),
        Text(" · ".join(describe_task(history.started)), style="dim", no_wrap=True, overflow="ellipsis"),
    ]


def _best_line(table: JobTable, history: RunHistory) -> Text:
    if history.refit is not None:
        return _refit_line(history, history.refit)
    best = next((row for row in table.rows if row.is_best), None)
    if best is None:
        return Text("best: no job has a finite validation loss yet", style="dim", overflow="fold")
    label = "best" if history.result is not None else "best so far"
    by = "" if history.metric == LOSS else f" by {metric_name(history.metric)}"
    job = history.jobs[best.job_id]
    metrics, tested = describe_metrics(job.best_metrics, table.metrics), describe_test(history, job)
    scoring = describe_scoring(history.finalists, history.scorer, "")  # the notes already report a failure
    chosen = f"; {scoring}" if scoring else ""
    return Text.assemble(
        f"{label}{by}: ",
        (best.job, "bold green"),
        f" with validation loss {format_loss(best.best_validation_loss)}",
        f" (test {tested})" if tested else "",
        f", {metrics}" if metrics else "",
        (f" ({best.label})" if best.label else "", "dim"),
        chosen,
        overflow="fold",
    )


def _refit_line(history: RunHistory, refit: RefitFact) -> Text:
    tested = (describe_test(history, job) for job in history.jobs.values())
    measured = "".join(f"; test loss {one}" for one in tested if one)
    return Text(f"{describe_refit(refit)}{measured}", overflow="fold")


def _samples(history: RunHistory) -> str:
    return (
        f"{format_count(history.samples_trained)} of {format_count(history.samples_budgeted)} samples trained, "
        f"{describe_savings(history)}"
    )


def _saved_by_reason(history: RunHistory) -> str:
    totals = [total for total in exit_totals(history) if total.samples_saved]
    return ", ".join(f"{clean(total.outcome)} {format_share(total.share)}" for total in totals)


def _place(history: RunHistory, run_dir: Path) -> Text:
    if history.result is not None:
        return Text(f"adapter: {clean(run_dir / 'best')}", overflow="fold")
    return Text(f"best checkpoints so far: {clean(run_dir / 'jobs')}", overflow="fold")
