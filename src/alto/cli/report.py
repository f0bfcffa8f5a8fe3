"""``alto report``: the outcome of a run, on the terminal and as a page."""

from __future__ import annotations

from rich.console import Console

from alto.cli.paths import Run

__all__ = ["report"]


def report(
    run: Run,
) -> None:
    """Show the jobs of RUN and write its report.html anew."""
    from alto.export import final_summary, write_report
    from alto.runs import RunDir, read_history

    history = read_history(run)
    path = write_report(run)
    console = Console()
    console.print(final_summary(history, run, max_rows=None, is_live=RunDir(run).is_locked()))
    console.print(f"report:  {path}", soft_wrap=True, highlight=False, markup=False)
