"""``alto list``: the runs and queues of a folder, or the tasks of a queue."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from alto.base import resume_command
from alto.cli.options import RUNS, AsJson, complete_queue, complete_run, reachable
from alto.cli.output import output_console, print_interrupted, print_json
from alto.errors import RunBusyError, RunError, RunNotFoundError
from alto.runs import (
    Mailbox,
    QueueDir,
    QueueMailbox,
    QueueProgress,
    RunDir,
    RunHistory,
    RunStatus,
    RunSummary,
    TaskHistory,
    find_runs,
    kept_jobs,
    read_history,
    remove_states,
    summarise,
)
from alto.spec import Keep


def list_(
    queue: Annotated[
        Path | None,
        typer.Argument(
            metavar="QUEUE",
            help="Folder of a queue; its tasks are listed.",
            callback=reachable,
            autocompletion=complete_queue,
        ),
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir",
            "-o",
            help="Folder of the run directories to list; by default ./runs.",
            callback=reachable,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON and nothing else.")] = False,
) -> None:
    """List the runs and queues in ./runs, newest first, or the tasks of QUEUE; only reads files."""
    if queue is None:
        _list_runs(output_dir, as_json=as_json)
    elif output_dir is None:
        _list_tasks(queue, as_json=as_json)
    else:
        raise typer.BadParameter("expected a queue or --output-dir, found both; leave one out", param_hint="QUEUE")


def _list_runs(folder: Path | None, *, as_json: bool) -> None:
    """Print the runs and queues in ``folder``, or in ``runs`` if it is None.

    Raises:
        RunNotFoundError: ``folder`` does not exist.
    """
    if folder is not None and not folder.is_dir():
        raise RunNotFoundError(
            f"--output-dir: expected a folder of runs, found none at {folder}; name the folder that the runs were "
            "made in"
        )
    root = RUNS if folder is None else folder
    runs, now = [summarise(path) for path in find_runs(root)], time.time()
    if as_json:
        print_json({"dir": str(root), "runs": [_run_facts(run, now) for run in runs]})
        return
    console = output_console()
    if not runs:
        text = f"no runs in {root.resolve()}; begin one with: alto tune FILE"
        console.print(text, soft_wrap=True, highlight=False, markup=False)
        return
    from alto.views import run_list

    console.print(run_list(runs, now), crop=False)


def _run_facts(run: RunSummary, now: float) -> dict[str, Any]:
    return {
        "name": run.root.name,
        "dir": str(run.root),
        "kind": "queue" if run.is_queue else "run",
        "state": run.state.value,
        "tasks": list(run.tasks),
        "num_jobs": run.num_jobs,
        "best_validation_loss": run.best_validation_loss,
        "done": run.fraction_done,
        "started_at": run.started_at,
        "age_s": round(now - run.started_at, 3),
        "problem": run.problem or None,
    }


def _list_tasks(queue: Path, *, as_json: bool) -> None:
    """Print the tasks of the queue and their progress.

    Raises:
        RunNotFoundError: ``queue`` is not the folder of a queue.
        RunError: The queue's journal is damaged.
    """
    if not QueueDir.exists(queue) and find_runs(queue):
        raise RunNotFoundError(
            f"expected the folder of a queue, found one that holds runs ({queue}); list its runs with: "
            f"alto list --output-dir {shlex.quote(str(queue))}"
        )
    queue_dir = QueueDir.open(queue)
    is_live = queue_dir.run.is_locked()
    progress = QueueProgress.read(queue_dir.root)
    tasks = list(progress.queue.tasks.values())
    num_commands = QueueMailbox(queue_dir.run).num_pending
    status = progress.queue.status(is_live=is_live)
    if as_json:
        facts = [_task_facts(progress, task) for task in tasks]
        print_json({"state": status.value, "commands": num_commands, "tasks": facts})
        return
    from alto.views import task_list

    console = output_console()
    console.print(task_list(progress))
    if status is RunStatus.INTERRUPTED:
        print_interrupted(console, queue_dir.root)
    if num_commands and not is_live:
        console.print(
            f"commands that wait for the next process: {num_commands}; {resume_command(queue_dir.root)}",
            soft_wrap=True,
            markup=False,
        )


def _task_facts(progress: QueueProgress, task: TaskHistory) -> dict[str, object]:
    return {
        "task": task.task,
        "state": task.state.value,
        "is_cancelled": task.is_cancelled,
        "tenant": task.demand.tenant,
        "priority": task.demand.priority,
        "num_gpus": task.demand.num_gpus,
        "expected_s": task.demand.duration_s,
        "done": progress.fraction_done(task),
        "attempts": len(task.attempts),
        "failure": task.failure or None,
        "unreadable": progress.unreadable.get(task.task),
    }


def _reachable(paths: list[Path]) -> list[Path]:
    for path in paths:
        reachable(path)
    return paths


def prune(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Folders of finished runs, or of queues (all of their runs are pruned).",
            callback=_reachable,
            autocompletion=complete_run,
        ),
    ],
    keep: Annotated[
        Keep,
        typer.Option("--keep", help="Which jobs keep their best adapters; the task's key keep has the same values."),
    ] = "finalists",
    as_json: AsJson = False,
) -> None:
    """Remove adapters and states of jobs that finished runs no longer need; best/, journal and report stay."""
    dirs = [run for root in runs for run in _runs_in(root)]
    # Check all runs first, so that nothing is removed if one of them is refused.
    histories = [_finished(run) for run in dirs]
    facts: list[dict[str, Any]] = []
    for run, history in zip(dirs, histories, strict=True):
        with run.locked():
            freed = remove_states(run, history, keep)
        kept = sorted(job for job in kept_jobs(history, keep) if run.job(job, "best").is_dir())
        facts.append({"dir": str(run.root), "kept": kept, "freed_bytes": freed})
        if not as_json:
            typer.echo(f"{run.root}: freed {freed:,} bytes, kept the best adapters of {', '.join(kept) or 'no job'}")
    total = sum(int(fact["freed_bytes"]) for fact in facts)
    if as_json:
        print_json({"runs": facts, "freed_bytes": total})
    elif len(facts) > 1:
        typer.echo(f"freed {total:,} bytes in all")


def _runs_in(root: Path) -> list[RunDir]:
    """Return the run in ``root``, or the runs of a queue's tasks that have started.

    Raises:
        RunNotFoundError: ``root`` is neither a run nor a queue.
    """
    if not QueueDir.exists(root):
        return [RunDir.open(root)]
    queue = QueueDir.open(root)
    entries, _ = queue.read()
    return [run for entry in entries if (run := queue.run_of(entry.task)).journal_file.is_file()]


def _finished(run: RunDir) -> RunHistory:
    """Return the history of a finished run, after checking that no process or waiting command needs it.

    Raises:
        RunBusyError: A process works on it.
        RunError: It is not finished, or a waiting command adds jobs to it, or its journal is damaged.
    """
    if run.is_locked():
        raise RunBusyError(
            f"expected a run that no process works on, found that a process works on {run.root}; prune it when it has "
            "ended"
        )
    history = read_history(run.root)
    if history.result is None or Mailbox(run).extends_run:
        found = "an interrupted run" if history.result is None else "a run to which a command adds jobs"
        raise RunError(
            f"expected a finished run, found {found} in {run.root}; finish it with: {resume_command(run.root)}, or "
            "delete its folder if you do not need it"
        )
    return history
