"""Shows the runs and queues of a folder as a table in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from alto.export.wording import clean, format_age, format_count, format_count_of, format_loss, format_share
from alto.runs import RunState, RunSummary

__all__ = ["run_list"]

STYLES = {
    RunState.RUNNING: "cyan",
    RunState.INTERRUPTED: "yellow",
    RunState.FINISHED: "green",
    RunState.DAMAGED: "red",
}


def run_list(runs: Sequence[RunSummary], now: float) -> RenderableType:
    """Return a table with a row for each run or queue, and a line for each damaged one.

    Args:
        runs: Runs and queues, in the order of the rows.
        now: Current time in Unix seconds, from which ages are computed.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    # Commands take this name, so it is never cut.
    table.add_column("run", no_wrap=True, min_width=max((len(clean(run.root.name)) for run in runs), default=0))
    table.add_column("state", no_wrap=True)
    table.add_column("task")  # may shrink: rich shrinks only columns that may wrap
    for heading in ("jobs", "best val", "done", "age"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            Text(clean(run.root.name)),
            Text(run.state.value, style=STYLES[run.state]),
            Text(_task(run), no_wrap=True, overflow="ellipsis"),
            "–" if run.num_jobs is None else format_count(run.num_jobs),
            format_loss(run.best_validation_loss),
            "–" if run.share_done is None else format_share(run.share_done),
            format_age(now - run.started_at),
        )
    problems = [Text(f"{clean(run.root.name)}: {clean(run.problem)}", style="yellow") for run in runs if run.problem]
    return Group(table, *problems)


def _task(run: RunSummary) -> str:
    if run.is_queue:
        return format_count_of(len(run.tasks), "task")
    return clean(run.tasks[0]) if run.tasks else "–"
