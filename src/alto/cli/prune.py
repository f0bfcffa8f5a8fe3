"""``alto prune``: frees the disk space that adapters and states of old runs use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from alto.cli.completion import complete_run
from alto.cli.options import AsJson
from alto.cli.output import print_json
from alto.cli.paths import reachable
from alto.errors import RunBusyError, RunError
from alto.runs import Mailbox, QueueDir, RunDir, RunHistory, kept_jobs, read_history, remove_states, resume_command
from alto.spec.task import Keep

__all__ = ["prune"]


def _reachable(paths: list[Path]) -> list[Path]:
    for path in paths:
        reachable(path)
    return paths


def prune(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Folders of finished runs, or of queues, whose runs are all pruned.",
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
            "remove its folder if you need nothing of it"
        )
    return history
