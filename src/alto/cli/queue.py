"""``alto submit``, ``cancel`` and ``drain``: control a queue that ``alto run`` works on, from another terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from alto.cli.answers import wait_for_answer
from alto.cli.completion import complete_queue
from alto.cli.options import Overrides
from alto.cli.paths import reachable
from alto.errors import QueueCommandError
from alto.runs import QueueAction, QueueDir, QueueMailbox, TaskStage, read_queue_history, resume_command
from alto.spec import load_task

__all__ = ["cancel", "drain", "submit"]

QueueFolder = Annotated[
    Path,
    typer.Argument(metavar="QUEUE", help="Folder of the queue.", callback=reachable, autocompletion=complete_queue),
]
Wait = Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for the queue's answer.")]

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
    wait_s: Wait = 60.0,
) -> None:
    """Submit the tasks in FILES to the queue, which runs them when it is their turn."""
    tasks = [load_task(file, overrides or ()) for file in files]
    queue_dir = QueueDir.open(queue)
    from alto.engine.runner import portable

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
    wait_s: Wait = 60.0,
) -> None:
    """Cancel tasks of a queue that is not finished; those that run save and end."""
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
        bool, typer.Option("--when-done", help="Do not end now: accept no more tasks, and end when all have ended.")
    ] = False,
    wait_s: Wait = 60.0,
) -> None:
    """End the queue: running tasks save and end; alto resume continues them."""
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
            otherwise = ", or on resumption" if remains else ""
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
