"""``alto report``: the result of a run, on the terminal and as a page."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from alto.cli.output import print_interrupted
from alto.cli.paths import AnyRun, run_to_show
from alto.runs import RunStatus

__all__ = ["report"]


def report(
    run: AnyRun = None,
    gpu_hour_price: Annotated[
        float | None,
        typer.Option(
            "--gpu-hour-price",
            metavar="PRICE",
            min=0,
            help="Price of an hour of the device, to show what the run cost and saved; by default "
            "$ALTO_GPU_HOUR_PRICE, or the price of the task's budget.",
        ),
    ] = None,
) -> None:
    """Show the jobs of RUN, or the tasks of a queue, and write its report.html again."""
    from alto.export import final_summary, queue_summary, write_queue_report, write_report
    from alto.runs import QueueDir, QueueProgress, RunDir, read_history

    console = Console()
    root = run_to_show(run, "report")
    is_live = RunDir(root).is_locked()
    if QueueDir.exists(root):
        path = write_queue_report(root, price=gpu_hour_price)
        progress = QueueProgress.read(root)
        console.print(queue_summary(progress, root, is_live=is_live))
        status, label = progress.queue.status(is_live=is_live), "report:   "
    else:
        history = read_history(root)
        path = write_report(root, price=gpu_hour_price)
        console.print(final_summary(history, root, max_rows=None, is_live=is_live))
        status, label = history.status(is_live=is_live), "report:  "
    if status is RunStatus.INTERRUPTED:
        print_interrupted(console, root)
    console.print(f"{label}{path}", soft_wrap=True, highlight=False, markup=False)
