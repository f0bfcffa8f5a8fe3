"""``alto job``, ``alto submit``, ``alto cancel`` and ``alto drain``: commands to runs and queues that a process works
on."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from alto.base import resume_command
from alto.cli.options import Overrides, Run, complete_job_key, complete_queue, reachable
from alto.errors import JobCommandError, QueueCommandError
from alto.runs import (
    CommandAnswer,
    JobAction,
    Mailbox,
    QueueAction,
    QueueDir,
    QueueMailbox,
    RunDir,
    TaskStage,
    read_history,
    read_queue_history,
)
from alto.spec import JobConfig, find_method, load_task, parse_override

_LOOK_S = 1.0
"""Interval at which the lock of the run is tested while waiting, in seconds."""


def wait_for_answer(
    run: RunDir, mailbox: Mailbox | QueueMailbox, command: str, wait_s: float
) -> tuple[bool, CommandAnswer | None]:
    """Return whether a process works on the run or queue, and its answer; stop waiting when the process ends.

    Args:
        run: The run or queue of the mailbox.
        mailbox: Holds the command.
        command: Id of the command.
        wait_s: Longest wait, in seconds.
    """
    gives_up_at = time.monotonic() + wait_s
    while True:
        is_live = run.is_locked()  # tested first: a process answers all commands before it ends
        left_s = max(0.0, gives_up_at - time.monotonic())
        answer = mailbox.wait_for_answer(command, min(left_s, _LOOK_S) if is_live else 0.0)
        if answer is not None or not is_live or not left_s:
            return is_live, answer


# ``alto job``: stops, resumes and clones jobs of a running task from another terminal; resumes and clones jobs of a
# finished task.

app = typer.Typer(
    name="job",
    help="Stop jobs of a task that is not finished; resume and clone jobs of any task.",
    no_args_is_help=True,
    add_completion=False,
)

JobName = Annotated[str, typer.Argument(metavar="JOB", help="Job, for example job-003; alto show lists them.")]
Wait = Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for the task's answer.")]


@app.command()
def stop(run: Run, job: JobName, wait_s: Wait = 60.0) -> None:
    """End JOB of a run that is not finished; its best adapter stays. It can be resumed until the task ends, and
    afterwards if the task has keep: all."""
    _ask(run, JobAction.STOP, job, wait_s=wait_s)


@app.command()
def resume(run: Run, job: JobName, wait_s: Wait = 60.0) -> None:
    """Resume JOB after you stopped it, or after early exit ended it in a task with keep: all. A finished run needs
    keep: all, and trains the job with the next alto resume RUN."""
    _ask(run, JobAction.RESUME, job, wait_s=wait_s)


@app.command()
def clone(
    run: Run,
    job: JobName,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A setting of the clone that differs from the job's.",
            autocompletion=complete_job_key,
        ),
    ] = None,
    warm: Annotated[
        bool, typer.Option("--warm", help="Start from the job's best weights instead of new ones.")
    ] = False,
    wait_s: Wait = 60.0,
) -> None:
    """Add a job with the configuration of JOB and some settings changed. A finished run needs keep: all; the next alto
    resume RUN trains the new job and updates the result."""
    changed = dict(map(parse_override, changes or ()))
    started = read_history(RunDir.open(run).root).started
    method = find_method("sft" if started is None else started.method)
    JobConfig.of(method, changed)  # invalid settings are reported here, whether or not the task runs
    _ask(run, JobAction.CLONE, job, changes=changed, warm=warm, wait_s=wait_s)


def _ask(
    run: Path,
    action: JobAction,
    job: str,
    *,
    changes: Mapping[str, Any] | None = None,
    warm: bool = False,
    wait_s: float,
) -> None:
    run_dir = RunDir.open(run)
    history = read_history(run_dir.root)
    if job not in history.jobs:
        raise JobCommandError(f"expected a job of this run, found {job!r}; it has {', '.join(history.jobs)}")
    if history.result is not None and action is JobAction.STOP:
        raise JobCommandError(
            f"expected a run that is not finished, found that {run_dir.root} is finished; no job trains"
        )
    mailbox = Mailbox(run_dir)
    command = mailbox.send(action, job, changes=changes, warm=warm)
    is_live, answer = wait_for_answer(run_dir, mailbox, command, wait_s)
    if answer is None and not is_live:
        root = run_dir.root if history.result is not None else _resumed(run_dir)
        typer.echo(f"No process works on this run; the command takes effect with: {resume_command(root)}")
    elif answer is None:
        typer.echo(
            f"No answer within {wait_s:g} s; the command takes effect before the next step, or when the run is resumed."
        )
    elif answer.done:
        typer.echo(answer.message)
    else:
        raise JobCommandError(answer.message)


def _resumed(run_dir: RunDir) -> Path:
    """Return the folder for ``alto resume``: the queue's if the run is a task of a queue, else the run's."""
    queue = run_dir.root.parents[1]
    return queue if QueueDir.exists(queue) else run_dir.root


QueueFolder = Annotated[
    Path,
    typer.Argument(metavar="QUEUE", help="Folder of the queue.", callback=reachable, autocompletion=complete_queue),
]
QueueWait = Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for the queue's answer.")]

_NO_PROCESS = "No process works on this queue."


def submit(
    queue: QueueFolder,
    files: Annotated[list[Path], typer.Argument(help="Task files (YAML).")],
    tenant: Annotated[
        str | None,
        typer.Option("--tenant", help="Tenant whose quota the tasks count against; by default as set in their files."),
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option("--priority", help="Tasks with a higher priority start first; by default as set in their files."),
    ] = None,
    overrides: Overrides = None,
    wait_s: QueueWait = 60.0,
) -> None:
    """Submit the tasks in FILES to the queue, which runs them when it is their turn.

    Rows in files of this machine are checked first; other rows are checked when the tasks start.
    """
    tasks = [load_task(file, overrides or ()) for file in files]
    queue_dir = QueueDir.open(queue)
    from alto.engine.runner import portable
    from alto.engine.start import check_visible_rows

    for notice in filter(None, map(check_visible_rows, tasks)):
        typer.echo(notice, err=True)
    mailbox = QueueMailbox(queue_dir.run)
    commands = [
        mailbox.submit(
            portable(task).to_dict(),
            tenant=task.tenant if tenant is None else tenant,
            priority=task.priority if priority is None else priority,
        )
        for task in tasks
    ]
    _show_answers(queue_dir, mailbox, commands, wait_s)


def cancel(
    queue: QueueFolder,
    tasks: Annotated[list[str], typer.Argument(metavar="TASK…", help="Tasks, as alto list names them.")],
    wait_s: QueueWait = 60.0,
) -> None:
    """Cancel tasks of a queue that is not finished; running tasks save their state and end."""
    queue_dir = QueueDir.open(queue)
    mailbox = QueueMailbox(queue_dir.run)
    if not mailbox.num_pending and queue_dir.run.journal_file.exists():  # a submitted task may be pending
        history = read_queue_history(queue_dir.root)
        if history.is_completed and not history.in_state(TaskStage.FAILED):  # alto resume tries failed ones again
            raise QueueCommandError(
                f"expected a queue that is not finished, found that {queue_dir.root} is finished; no task runs or waits"
            )
    _show_answers(queue_dir, mailbox, [mailbox.ask(QueueAction.CANCEL, task) for task in tasks], wait_s)


def drain(
    queue: QueueFolder,
    when_done: Annotated[
        bool, typer.Option("--when-done", help="Do not end now: accept no more tasks, and end after the last task.")
    ] = False,
    wait_s: QueueWait = 60.0,
) -> None:
    """End the queue: running tasks save their state and end; alto resume continues them."""
    queue_dir = QueueDir.open(queue)
    if not queue_dir.run.is_locked():
        typer.echo(_NO_PROCESS)
        return
    mailbox = QueueMailbox(queue_dir.run)
    command = mailbox.ask(QueueAction.FINISH if when_done else QueueAction.DRAIN)
    _show_answers(queue_dir, mailbox, [command], wait_s, remains=False)


def _show_answers(
    queue_dir: QueueDir, mailbox: QueueMailbox, commands: Sequence[str], wait_s: float, *, remains: bool = True
) -> None:
    """Print the outcome of each command.

    Args:
        remains: Whether commands that no process carries out now stay for the next process.

    Raises:
        QueueCommandError: Some were refused; the results of the others are printed first.
    """
    refusals = []
    for command in commands:
        is_live, answer = wait_for_answer(queue_dir.run, mailbox, command, wait_s)
        if answer is None and is_live:
            otherwise = ", or when the queue is resumed" if remains else ""
            typer.echo(f"No answer within {wait_s:g} s; the command takes effect as soon as possible{otherwise}.")
        elif answer is None and remains:
            typer.echo(f"{_NO_PROCESS[:-1]}; the command takes effect with: {resume_command(queue_dir.root)}")
        elif answer is None:
            typer.echo(_NO_PROCESS)
        elif answer.done:
            typer.echo(answer.message)
        else:
            refusals.append(answer.message)
    if refusals:
        raise QueueCommandError("\n".join(refusals))
