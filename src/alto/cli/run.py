"""``alto run``: many tasks, scheduled onto the GPUs of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from alto.cli.options import AsJson, OutputDir, Overrides, Quiet, Strategy
from alto.cli.output import (
    catching_signals,
    output_console,
    print_error,
    print_json,
    print_notices,
    print_stop,
    queue_progress,
    result_facts,
)
from alto.errors import SpecError, TaskInterruptedError
from alto.runs import QueueDir, QueueProgress
from alto.spec import load_task

if TYPE_CHECKING:
    from alto.engine import Engine
    from alto.results import TaskResult


def run(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Task files (YAML); none is needed with --wait-for-tasks.")
    ] = None,
    total_gpus: Annotated[
        int | None,
        typer.Option("--total-gpus", min=1, help="Number of GPUs to use; of CPU slots if there are no GPUs."),
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster", help="local, a Ray cluster (auto or ray://HOST:PORT), or a cluster of a package (NAME://…)."
        ),
    ] = "local",
    strategy: Strategy = "adapter_parallel",
    method: Annotated[
        str, typer.Option("--method", help="Method of scheduling: cp-sat, milp, lpt, sjf, fifo.")
    ] = "cp-sat",
    quotas: Annotated[
        list[str] | None,
        typer.Option("--quota", metavar="TENANT=GPUS", help="Maximum number of GPUs that a tenant uses at a time."),
    ] = None,
    share_executor: Annotated[
        bool,
        typer.Option(
            "--share-executor/--no-share-executor",
            help="Train tasks on the same base model together in one process, if all of them are then done sooner.",
        ),
    ] = True,
    wait_for_tasks: Annotated[
        bool,
        typer.Option(
            "--wait-for-tasks",
            help="Keep running when all tasks have ended, to accept tasks of alto submit; end it with alto drain.",
        ),
    ] = False,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="Allow the Python code of base models to run, for tasks of alto submit too."
        ),
    ] = False,
    output_dir: OutputDir = Path("runs"),
    overrides: Overrides = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run the tasks in FILES side by side so that all finish as early as possible; keep the best adapter of each."""
    if not files and not wait_for_tasks:
        raise typer.BadParameter("expected task files, or --wait-for-tasks", param_hint="FILES")
    tasks = [load_task(file, overrides or ()) for file in files or ()]
    limits = dict(_quota(text) for text in quotas or ())
    progress = QueueProgress()

    def work(engine: Engine) -> tuple[Path, list[TaskResult]]:
        with engine.queue(tasks, method=method, trust_remote_code=trust_remote_code) as queue:
            progress.folder = QueueDir(queue.root)
            if wait_for_tasks:
                typer.echo(
                    f"Waits for tasks: alto submit {queue.root} FILE; end it with: alto drain {queue.root}", err=True
                )
            else:
                queue.finish()
            queue.serve()
        return queue.root, queue.results()

    work_on_queue(
        work,
        progress,
        as_json=as_json,
        quiet=quiet,
        strategy=strategy,
        output_dir=output_dir,
        total_gpus=total_gpus,
        cluster=cluster,
        quotas=limits,
        share_executor=share_executor,
    )


def work_on_queue(
    work: Callable[[Engine], tuple[Path, list[TaskResult]]],
    progress: QueueProgress,
    *,
    as_json: bool,
    quiet: bool,
    queue: Path | None = None,
    **settings: object,
) -> None:
    """Run a queue with an engine, and show it.

    Args:
        work: Works on the queue; returns its folder and results.
        progress: Progress of the queue, which may have started before; it is updated.
        as_json, quiet: Print the results as JSON, or only the adapters' folders, instead of the table.
        queue: The queue that is resumed; None for a new one.
        settings: Settings of the engine.
    """
    from alto.engine import Engine
    from alto.views import queue_summary

    console = output_console()
    with catching_signals("queue") as interrupt:
        try:
            with queue_progress(console, interrupt, progress, silent=quiet or as_json) as views:
                observers = [interrupt.observe, *views]
                root, results = work(Engine(observers=observers, is_interrupted=interrupt.requested, **settings))  # type: ignore[arg-type]
        except TaskInterruptedError as error:
            print_error(error)
            raise typer.Exit(interrupt.exit_code or 1) from None
        except KeyboardInterrupt as stop:
            print_stop(interrupt.how_to_continue(stop, queue))
            raise typer.Exit(interrupt.exit_code or 130) from None
    if as_json:
        print_json({"tasks": [result_facts(result) for result in results]})
    elif quiet:
        for result in results:
            typer.echo(result.adapter_dir)
    else:
        console.print(queue_summary(progress, root))
        report = root / "report.html"
        where = str(report) if report.exists() else f"none could be written; create it later with: alto report {root}"
        console.print(f"report:   {where}", soft_wrap=True, highlight=False, markup=False)
    print_notices(results)


def _quota(text: str) -> tuple[str, int]:
    tenant, sign, number = text.rpartition("=")
    if not sign or not number.isdecimal() or int(number) < 1:
        raise SpecError(f"--quota: expected TENANT=GPUS with 1 GPU or more, found {text!r}")
    return tenant, int(number)
