"""``alto report``: the outcome of a run, on the terminal and as a page."""

from __future__ import annotations

from rich.console import Console

from alto.cli.paths import Run

__all__ = ["report"]


def report(
    run: Run,
) -> None:
    """Show the jobs of RUN, or the tasks of a queue, and write its report.html again."""
    from alto.export import final_summary, queue_summary, write_queue_report, write_report
    from alto.runs import QueueDir, QueueProgress, RunDir, read_history

    console = Console()
    if QueueDir.exists(run):
        path = write_queue_report(run)
        console.print(queue_summary(QueueProgress.read(run), run))
        console.print(f"report:   {path}", soft_wrap=True, highlight=False, markup=False)
        return
    history = read_history(run)
    path = write_report(run)
    console.print(final_summary(history, run, max_rows=None, is_live=RunDir(run).is_locked()))
    console.print(f"report:  {path}", soft_wrap=True, highlight=False, markup=False)
