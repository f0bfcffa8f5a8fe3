"""``alto job``: stops, resumes and clones jobs of a running task from another terminal; resumes and clones jobs of a
finished task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from alto.cli.answers import wait_for_answer
from alto.cli.completion import complete_job_key
from alto.cli.paths import Run
from alto.errors import JobCommandError
from alto.runs import Action, Mailbox, QueueDir, RunDir, read_history, resume_command
from alto.spec import JobConfig, parse_override
from alto.spec.method import find_method

__all__ = ["app"]

app = typer.Typer(
    name="job",
    help="Stop jobs of a task that is not finished; resume and clone jobs of any task.",
    no_args_is_help=True,
)

JobName = Annotated[str, typer.Argument(metavar="JOB", help="Job, for example job-003; alto show lists them.")]
Wait = Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for the task's answer.")]


@app.command()
def stop(run: Run, job: JobName, wait_s: Wait = 60.0) -> None:
    """End JOB of a run that is not finished; its best adapter stays. It can be resumed until the task ends, and
    afterwards if the task has keep: all."""
    _ask(run, Action.STOP, job, wait_s=wait_s)


@app.command()
def resume(run: Run, job: JobName, wait_s: Wait = 60.0) -> None:
    """Resume JOB after you stopped it, or after early exit ended it in a task with keep: all. A finished run needs
    keep: all, and trains the job with the next alto resume RUN."""
    _ask(run, Action.RESUME, job, wait_s=wait_s)


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
    _ask(run, Action.CLONE, job, changes=changed, warm=warm, wait_s=wait_s)


def _ask(
    run: Path, action: Action, job: str, *, changes: Mapping[str, Any] | None = None, warm: bool = False, wait_s: float
) -> None:
    run_dir = RunDir.open(run)
    history = read_history(run_dir.root)
    if job not in history.jobs:
        raise JobCommandError(f"expected a job of this run, found {job!r}; it has {', '.join(history.jobs)}")
    if history.result is not None and action is Action.STOP:
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
        typer.echo(f"No answer within {wait_s:g} s; the command takes effect before the next step, or on resumption.")
    elif answer.done:
        typer.echo(answer.message)
    else:
        raise JobCommandError(answer.message)


def _resumed(run_dir: RunDir) -> Path:
    """Return the folder for ``alto resume``: the queue's if the run is a task of a queue, else the run's."""
    queue = run_dir.root.parents[1]
    return queue if QueueDir.exists(queue) else run_dir.root
