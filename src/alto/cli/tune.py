"""``alto tune``: train one task."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from alto.cli.options import (
    AsJson,
    InterruptedRun,
    OutputDir,
    Overrides,
    Quiet,
    Run,
    Strategy,
    TrustRemoteCode,
    interrupted_run,
)
from alto.cli.output import (
    catching_signals,
    output_console,
    print_error,
    print_json,
    print_notices,
    print_stop,
    progress,
    result_facts,
)
from alto.cli.run import work_on_queue
from alto.errors import TaskInterruptedError
from alto.runs import QueueDir, QueueProgress
from alto.spec import load_task

if TYPE_CHECKING:
    from alto.engine import Engine
    from alto.results import TaskResult


def tune(
    file: Annotated[Path, typer.Argument(help="Task file (YAML).")],
    strategy: Strategy = "adapter_parallel",
    output_dir: OutputDir = Path("runs"),
    overrides: Overrides = None,
    packing_from: Annotated[
        Path | None,
        typer.Option(
            help="Run directory of the same task: pack jobs as that run did, for results that are equal to the last "
            "bit."
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run the task in FILE and keep its best adapter."""
    task = load_task(file, overrides or ())
    train(
        lambda engine: engine.tune(task, packing_from=packing_from),
        strategy=strategy,
        output_dir=output_dir,
        as_json=as_json,
        quiet=quiet,
    )


def train(
    work: Callable[[Engine], TaskResult],
    *,
    strategy: str,
    output_dir: Path,
    as_json: bool,
    quiet: bool,
    run: Path | None = None,
) -> None:
    """Run one task with an engine, and show it.

    Args:
        work: Trains the task on an engine.
        strategy, output_dir: See :class:`alto.Engine`.
        as_json, quiet: Print the result as JSON, or only the adapter's folder, instead of the table.
        run: The run that is resumed; None for a new one.
    """
    from alto.engine import Engine
    from alto.runs import read_history
    from alto.views import final_summary

    console = output_console()
    with catching_signals() as interrupt:
        try:
            with progress(console, interrupt, silent=quiet or as_json) as views:
                observers = [interrupt.observe, *views]
                engine = Engine(
                    strategy=strategy,
                    output_dir=output_dir,
                    observers=observers,
                    is_interrupted=interrupt.requested,
                    progress=False,
                )
                result = work(engine)
        except TaskInterruptedError as error:
            print_error(error)
            raise typer.Exit(interrupt.exit_code or 1) from None
        except KeyboardInterrupt as stop:
            print_stop(interrupt.how_to_continue(stop, run))
            raise typer.Exit(interrupt.exit_code or 130) from None
    if as_json:
        print_json(result_facts(result))
    elif quiet:
        typer.echo(result.adapter_dir)
    else:
        history = read_history(result.run_dir)
        console.print(final_summary(history, result.run_dir))
        if not result.notices:
            report = Path(result.run_dir) / "report.html"
            console.print(f"report:  {report}", soft_wrap=True, highlight=False, markup=False)
        if history.method == "classification" and result.test_loss is not None:
            following = f"alto eval {shlex.quote(result.run_dir)}"
            line = f"next:    {following}  (F1 of each label, and which labels are confused, on the test rows)"
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    print_notices([result])


def refit(
    run: Run,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir",
            "-o",
            help="Folder in which the run directory is made; by default the one that contains RUN.",
        ),
    ] = None,
    strategy: Strategy = "adapter_parallel",
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train the winner of the finished RUN again on all its rows, including the validation set, in a new run.

    The refit uses the winner's settings and seed, and trains up to the step of its best checkpoint. Nothing is
    validated.
    """
    train(
        lambda engine: engine.refit(run, to=output_dir, trust_remote_code=trust_remote_code),
        strategy=strategy,
        output_dir=run.parent,
        as_json=as_json,
        quiet=quiet,
    )


def resume(
    run: InterruptedRun = None,
    num_gpus: Annotated[
        int | None, typer.Option("--num-gpus", min=1, help="Number of GPUs from now on; not for a queue.")
    ] = None,
    strategy: Strategy = "adapter_parallel",
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            help="For a queue that was started on a Ray cluster with an address, or on a package's cluster: the same "
            "value again.",
        ),
    ] = "local",
    wait_for_tasks: Annotated[
        bool,
        typer.Option("--wait-for-tasks", help="For a queue: keep running when all tasks have ended, until alto drain."),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Resume an interrupted RUN or queue from its last checkpoint; by default the latest interrupted one in ./runs.

    A queue keeps the strategy that it started with.
    """
    root = interrupted_run(run)
    if QueueDir.exists(root):
        work_on_queue(
            lambda engine: (
                root,
                engine.resume_queue(root, trust_remote_code=trust_remote_code, keep_open=wait_for_tasks),
            ),
            QueueProgress.before_resume(root),
            as_json=as_json,
            quiet=quiet,
            queue=root,
            output_dir=root.parent,
            cluster=cluster,
        )
    else:
        train(
            lambda engine: engine.resume(root, num_gpus=num_gpus, trust_remote_code=trust_remote_code),
            strategy=strategy,
            output_dir=root.parent,
            as_json=as_json,
            quiet=quiet,
            run=root,
        )
