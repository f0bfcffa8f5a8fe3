"""Shows the progress of a queue in the terminal: tasks and GPUs, live or as plain lines, and a summary at the end."""

from __future__ import annotations

import bisect
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from alto.runs import JournalEntry, QueueHistory, QueueProgress, RunStatus, TaskHistory, TaskStage, events
from alto.views.wording import clean, describe_measuring, format_count_of, format_duration, format_loss, format_percent

REFRESHES_PER_SECOND = 2
STYLES = {
    TaskStage.WAITING: "dim",
    TaskStage.RUNNING: "cyan",
    TaskStage.FINISHED: "green",
    TaskStage.FAILED: "red",
    TaskStage.CANCELLED: "dim",
}
ORDER = (TaskStage.RUNNING, TaskStage.WAITING, TaskStage.FAILED, TaskStage.FINISHED, TaskStage.CANCELLED)
# Lines of the live view that do not show tasks.
FRAME_LINES = 8
_BAR = 10
_GPUS = 12
_WIDTH_OF_BARS = 100
_WIDTH_OF_LOSSES = 75


def open_queue_view(console: Console, progress: QueueProgress | None = None) -> LiveQueueView | PlainQueueView:
    """Return the live table if ``console`` is a screen that can redraw itself, else plain lines.

    Args:
        progress: The progress before the first observed entry, which the view updates; by default an empty one.
    """
    can_redraw = console.is_interactive and console.file.isatty() and not console.options.ascii_only
    return LiveQueueView(console, progress) if can_redraw else PlainQueueView(console.file, progress)


class LiveQueueView:
    """Redraws tasks and GPUs in place; a context manager. ``observe`` may be called from any thread."""

    def __init__(
        self, console: Console, progress: QueueProgress | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.progress = QueueProgress() if progress is None else progress
        self._console = console
        self._clock = clock
        self._lock = threading.Lock()
        self._announcement = ""
        self._live = Live(
            console=console, get_renderable=self._render, refresh_per_second=REFRESHES_PER_SECOND, transient=True
        )

    def __enter__(self) -> LiveQueueView:
        self._live.start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._live.stop()
        if error is not None and self.progress.queue.tasks:
            self._console.print(queue_summary(self.progress))

    def observe(self, entry: JournalEntry) -> None:
        """Apply one entry; the next redraw shows it."""
        with self._lock:
            self.progress.apply(entry)

    def announce(self, text: str) -> None:
        """Show ``text`` at the top of the view, from now until the view ends."""
        self._announcement = text
        self._live.refresh()

    def _render(self) -> RenderableType:
        with self._lock:
            announced = [Text(self._announcement, style="bold yellow", overflow="fold")] if self._announcement else []
            size = self._console.size
            num_lines = sum(len(line.wrap(self._console, size.width)) for line in announced)
            return Group(*announced, self._screen(self._clock(), height=size.height - num_lines))

    def _screen(self, now: float, *, height: int) -> RenderableType:
        queue = self.progress.queue
        if queue.started is not None and not queue.tasks:
            return Text("Waiting for tasks", style="dim")
        if not queue.tasks:
            return Text(f"Measuring memory and time of the tasks … {self.progress.num_measured} measured", style="dim")
        tasks = sorted(queue.tasks.values(), key=lambda task: ORDER.index(task.state))
        num_lines = max(1, height - FRAME_LINES - len(queue.nodes))
        lines = itertools.accumulate(2 if _note(task) else 1 for task in tasks)
        shown = tasks[: max(1, bisect.bisect_right(list(lines), num_lines))]
        return Group(
            Text(_headline(queue), style="bold", no_wrap=True, overflow="ellipsis"),
            Text(_plan_line(queue, now), style="dim", no_wrap=True, overflow="ellipsis"),
            *(Text(line, no_wrap=True, overflow="ellipsis") for line in gpu_lines(self.progress)),
            "",
            _TaskTable(progress=self.progress, tasks=shown, now=now, hidden=len(tasks) - len(shown)),
        )


class PlainQueueView:
    """Writes one line per noteworthy event to ``stream``; a context manager like the live view."""

    def __init__(self, stream: IO[str], progress: QueueProgress | None = None) -> None:
        self.progress = QueueProgress() if progress is None else progress
        self._stream = stream

    def __enter__(self) -> PlainQueueView:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def observe(self, entry: JournalEntry) -> None:
        """Apply one entry and write a line about it if needed."""
        self.progress.apply(entry)
        line = None if entry.is_replayed else _line(self.progress, entry.event)
        if line:
            self._stream.write(f"{format_duration(self.progress.queue.duration_s):>8}  {line}\n")
            self._stream.flush()


def queue_summary(
    progress: QueueProgress, queue_dir: str | Path | None = None, *, is_live: bool = True, now: float | None = None
) -> RenderableType:
    """Return the table of tasks, and the folder of their adapters.

    Args:
        queue_dir: The queue's folder; None leaves out the folder of the adapters.
        now: Unix time until which running tasks are counted; by default the time of the latest event.
    """
    queue = progress.queue
    status = queue.status(is_live=is_live)
    if now is None or status is not RunStatus.RUNNING:
        now = queue.last_seen_at or 0.0
    state = "not finished" if status is RunStatus.RUNNING else status.value
    lines: list[RenderableType] = [
        Text.assemble((_headline(queue), "bold"), f": {state} after {_wall_time(queue, now)}"),
        *(Text(f"note: {clean(notice)}", style="yellow") for notice in queue.notices),
        *_unreadable(progress),
        "",
        _TaskTable(progress=progress, tasks=list(queue.tasks.values()), now=now, is_live=status is RunStatus.RUNNING),
    ]
    if queue_dir is not None:
        lines.append(Text(f"adapters: {clean(Path(queue_dir) / 'tasks')}/<task>/best", overflow="fold"))
    return Group(*lines)


def _wall_time(queue: QueueHistory, now: float) -> str:
    """Describe how long the queue has worked, and the part for measuring before its first schedule."""
    total = format_duration(queue.worked_s(now))
    return f"{total}, including {format_duration(queue.measuring_s)} for measuring" if queue.measuring_s else total


def task_list(progress: QueueProgress) -> RenderableType:
    """Return a table of the tasks of a queue, their tenants and their progress."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("task", "state", "tenant", "priority", "GPUs", "done"):
        table.add_column(column, overflow="fold")
    for task in progress.queue.tasks.values():
        table.add_row(
            clean(task.task),
            Text(task.state.value, style=STYLES[task.state]),
            clean(task.demand.tenant),
            str(task.demand.priority),
            str(task.demand.num_gpus),
            format_percent(progress.fraction_done(task)),
        )
    return Group(table, *_unreadable(progress))


def _unreadable(progress: QueueProgress) -> list[Text]:
    """Return a line for each task whose progress is unknown."""
    return [Text(f"task {clean(task)}: {clean(why)}", style="yellow") for task, why in progress.unreadable.items()]


def gpu_lines(progress: QueueProgress) -> list[str]:
    """Describe which task runs on which GPU, one line per node."""
    holders = progress.holders()
    lines = []
    for node in progress.queue.nodes:
        on_node = {gpu.index: name for gpu, name in holders.items() if gpu.node == node.name}
        lines.append(f"{clean(node.name)}: " + "  ".join(f"{n} {clean(on_node.get(n, '–'))}" for n in node.gpus))
    return lines


def _headline(queue: QueueHistory) -> str:
    devices = format_count_of(queue.num_gpus, "GPU" if queue.has_gpus else "CPU slot")
    num_done = len(queue.in_state(TaskStage.FINISHED))
    failed, cancelled = (len(queue.in_state(stage)) for stage in (TaskStage.FAILED, TaskStage.CANCELLED))
    return (
        f"{num_done} of {format_count_of(len(queue.tasks), 'task')} done on {devices}"
        + (f", {failed} given up" if failed else "")
        + (f", {cancelled} cancelled" if cancelled else "")
    )


def _plan_line(queue: QueueHistory, now: float) -> str:
    elapsed = f"{format_duration(queue.worked_s(now))} so far"
    if not queue.plans:
        return elapsed
    plan = queue.plans[-1]
    left_s = max(0.0, plan.at + plan.makespan_s - now)
    quality = (
        plan.status
        if plan.status != "feasible"
        else f"at most {_gap(plan.makespan_s, plan.bound_s)} longer than needed"
    )
    return f"about {format_duration(left_s)} left by {plan.method} ({quality}) · {elapsed} · plan {len(queue.plans)}"


def _gap(makespan_s: float, bound_s: float) -> str:
    return format_percent(makespan_s / bound_s - 1.0) if bound_s else "?"


@dataclass(frozen=True, slots=True, kw_only=True)
class _TaskTable:
    """A row for each task, and notes on single tasks under the table.

    On a narrow terminal, bars and expected times are dropped first, then losses; then names of tasks are cut.
    """

    progress: QueueProgress
    tasks: Sequence[TaskHistory]
    now: float
    hidden: int = 0
    is_live: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        has_bar, has_losses = options.max_width >= _WIDTH_OF_BARS, options.max_width >= _WIDTH_OF_LOSSES
        table = Table(box=box.SIMPLE_HEAD, show_edge=False)
        table.add_column("task")  # may shrink: rich shrinks only columns that may wrap
        table.add_column("state", no_wrap=True)
        table.add_column("GPUs", no_wrap=True, max_width=_GPUS, overflow="ellipsis")
        if has_bar:
            table.add_column("", no_wrap=True, min_width=_BAR)
        table.add_column("done", justify="right", no_wrap=True, min_width=len("100 %"))
        if has_losses:
            table.add_column("loss", justify="right", no_wrap=True, min_width=6)
        table.add_column("time", justify="right", no_wrap=True, overflow="ellipsis")
        for task in self.tasks:
            done, loss = self.progress.fraction_done(task), self.progress.best_loss(task)
            is_interrupted = task.state is TaskStage.RUNNING and not self.is_live
            state = RunStatus.INTERRUPTED.value if is_interrupted else task.state.value
            bar = ProgressBar(total=1.0, completed=done, width=_BAR, complete_style="cyan", finished_style="green")
            table.add_row(
                Text(clean(task.task), no_wrap=True, overflow="ellipsis"),
                Text(state, style=STYLES[task.state]),
                Text(_gpus(task)),
                *([bar] if has_bar else []),
                format_percent(done),
                *(["" if loss is None else format_loss(loss)] if has_losses else []),
                _time(task, self.now, is_short=not has_bar),
            )
        yield table
        if self.hidden > 0:
            yield Text(f"… and {self.hidden} more", style="dim")
        for task in self.tasks:
            if note := _note(task) if self.is_live or task.measuring is None else "":
                yield Text(f"{clean(task.task)}: {note}", style="yellow", no_wrap=True, overflow="ellipsis")


def _gpus(task: TaskHistory) -> str:
    if task.state is TaskStage.RUNNING and task.attempts:
        return " ".join(str(gpu.index) for gpu in task.attempts[-1].gpus)
    return f"×{task.demand.num_gpus}"


def _time(task: TaskHistory, now: float, *, is_short: bool) -> str:
    """Describe elapsed and planned duration; only one of them on a narrow terminal."""
    spent_s = task.spent_s(now)
    expected = format_duration(task.demand.duration_s)
    if not task.attempts:
        return "not measured yet" if task.is_unmeasured else f"about {expected}"
    return format_duration(spent_s) if is_short else f"{format_duration(spent_s)} (planned {expected})"


def _note(task: TaskHistory) -> str:
    if task.measuring is not None:
        return describe_measuring(task.measuring)
    if task.failure:
        return clean(task.failure)
    if task.is_cancelled:
        return "being cancelled: saves its state, then ends" if task.state is TaskStage.RUNNING else ""
    lost = [attempt for attempt in task.attempts if attempt.outcome not in (None, "finished")]
    return f"attempt {task.attempts[-1].number}; before: {clean(lost[-1].reason)}" if lost else ""


def _line(progress: QueueProgress, event: events.Event) -> str | None:
    """Return the line for ``event``, which has already been applied; None if it has none."""
    queue = progress.queue
    match event:
        case events.MeasuringBegun() as begun:
            return describe_measuring(begun)
        case events.TaskRelayed(entry=JournalEntry(event=events.MeasuringBegun() as begun)):
            return describe_measuring(begun)
        case events.TaskMeasured(task=task, duration_s=duration_s):
            return f"{clean(task)} is estimated to take {format_duration(duration_s)}"
        case events.TaskSubmitted(task=task):
            return f"{clean(task)} was submitted"
        case events.TaskCancelled(task=task):
            return f"{clean(task)} is cancelled"
        case events.QueueStarted() | events.QueueResumed() | events.QueueCompleted():
            return _headline(queue)
        case events.SchedulePlanned():
            plan = queue.plans[-1]
            made = f"planned by {plan.method} ({plan.status}; {clean(plan.reason)})"
            is_known = len(queue.plans) > 1 and queue.plans[-2].notice == plan.notice
            notice = f"; note: {clean(plan.notice)}" if plan.notice and not is_known else ""
            return f"{made}: about {format_duration(plan.makespan_s)} left{notice}"
        case events.AttemptStarted(task=task):
            attempt = queue.tasks[task].attempts[-1].number
            gpus = ", ".join(f"{gpu.node}:{gpu.index}" for gpu in event.gpus)
            again = "" if attempt == 1 else f", attempt {attempt}"
            return f"{clean(task)} started on {clean(gpus)}{again}"
        case events.AttemptEnded(task=task, outcome="finished"):
            loss = progress.best_loss(queue.tasks[task])
            return f"{clean(task)} finished" + ("" if loss is None else f" with validation loss {format_loss(loss)}")
        case events.AttemptEnded(task=task, reason=reason):
            return f"{clean(task)} ended without a result: {clean(reason)}"
        case events.TaskGivenUp(task=task, reason=reason):
            return f"{clean(task)} given up: {clean(reason)}"
        case events.GpuLost(node=node, index=index):
            return f"{clean(node)}:{index} lost"
        case events.GpuAdded(node=node, index=index):
            return f"{clean(node)}:{index} added"
    return None
