"""The runs and queues in one folder: a summary of each, newest first, and the latest one.

The summary of a damaged run says what is wrong. For a finished run, only a few lines of the journal are decoded.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from alto.base import open_regular
from alto.errors import AltoError, RunNotFoundError
from alto.runs.events import JobAdded, TaskCompleted, TaskStarted, decode, decode_only
from alto.runs.history import RunHistory
from alto.runs.job_history import RunStatus
from alto.runs.journal import NOT_FOLDABLE, read_events
from alto.runs.progress import fraction_done
from alto.runs.queue_dir import QueueDir
from alto.runs.queue_history import QueueHistory, TaskStage, read_queue_history
from alto.runs.run_dir import RunDir

_FIRST_TIME = re.compile(rb'\{"seq": \d+, "time": (\d+(?:\.\d+)?)')
"""Pattern of the beginning of a journal's first line."""


class RunState(StrEnum):
    """State of a run or queue in a list: a `RunStatus`, or ``damaged`` if its files cannot be read."""

    RUNNING = RunStatus.RUNNING.value
    INTERRUPTED = RunStatus.INTERRUPTED.value
    FINISHED = RunStatus.FINISHED.value
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run or queue of a folder.

    Attributes:
        started_at: When it began, in unix seconds.
        tasks: Names of its tasks, one for a run; empty if it has none yet or they are unknown.
        num_jobs: Jobs of all its tasks; None if unknown.
        best_validation_loss: Loss of the chosen job, or the best so far. None if there is none, and for a queue of
            several tasks, whose losses cannot be compared.
        fraction_done: Fraction of the samples expected to be trained in total that are trained, in [0, 1]; for a queue
            the mean over its tasks. None if unknown.
        problem: Damage and remedy; empty if nothing is damaged.
    """

    root: Path
    is_queue: bool
    state: RunState
    started_at: float
    tasks: tuple[str, ...] = ()
    num_jobs: int | None = None
    best_validation_loss: float | None = None
    fraction_done: float | None = None
    problem: str = ""


def find_runs(folder: str | Path) -> list[Path]:
    """Return the folders of all runs and queues in ``folder``, newest first by start; empty if there is no folder."""
    try:
        found = [path for path in Path(folder).iterdir() if not path.name.startswith(".") and _is_run(path)]
    except OSError:
        return []
    return sorted(found, key=lambda path: (-_started_at(path), path.name))


def latest_run(folder: str | Path, is_wanted: Callable[[Path], bool] = lambda root: True) -> Path | None:
    """Return the newest run or queue in ``folder`` for which ``is_wanted`` is true; None if there is none."""
    return next((root for root in find_runs(folder) if is_wanted(root)), None)


def summarise(root: Path) -> RunSummary:
    """Return the summary of the run or queue in ``root``; if its files cannot be read, the summary says why."""
    is_queue, started_at = _is_queue(root), _started_at(root)
    try:
        return _of_queue(root, started_at) if is_queue else _of_run(root, started_at)
    except AltoError as error:
        problem = str(error)
    except (OSError, *NOT_FOLDABLE) as error:
        problem = (
            f"expected a journal as ALTO writes it, found invalid content ({error!r:.100}); restore the original file"
        )
    return RunSummary(root=root, is_queue=is_queue, state=RunState.DAMAGED, started_at=started_at, problem=problem)


def _of_run(root: Path, started_at: float) -> RunSummary:
    run = RunDir(root.resolve())
    if not run.task_file.is_file():
        raise RunNotFoundError(f"expected the task of the run at {run.task_file}, found no such file; put it back")
    is_live = run.is_locked()  # tested first: a process may finish the run while it is read
    history = _history(run)
    best = history.best
    if history.result is not None:
        loss = history.result.best_validation_loss
    else:
        loss = best.best_validation_loss if best is not None else math.inf
    return RunSummary(
        root=root,
        is_queue=False,
        state=RunState(history.status(is_live=is_live)),
        started_at=started_at,
        tasks=() if history.started is None else (history.name,),
        num_jobs=None if history.started is None else len(history.jobs),
        best_validation_loss=loss if math.isfinite(loss) else None,
        fraction_done=fraction_done(history),
    )


def _history(run: RunDir) -> RunHistory:
    """Return the history of a run; for a finished run, without the events of its jobs.

    Every line is parsed as JSON, so that damage is found; decoding all lines would take longer.
    """
    lines = read_events(run.journal_file)
    if decode_only(lines[-1:], (TaskCompleted,), run.journal_file):
        return RunHistory.of(decode_only(lines, (TaskStarted, JobAdded, TaskCompleted), run.journal_file))
    return RunHistory.of(decode(line, run.journal_file) for line in lines)


def _of_queue(root: Path, started_at: float) -> RunSummary:
    queue = QueueDir.open(root)
    is_live = queue.run.is_locked()
    history = read_queue_history(root)
    runs = [summarise(queue.run_of(task).root) for task in history.tasks]
    known = [run.num_jobs for run in runs if run.num_jobs is not None]
    losses = [run.best_validation_loss for run in runs]
    return RunSummary(
        root=root,
        is_queue=True,
        state=RunState(history.status(is_live=is_live)),
        started_at=started_at,
        tasks=tuple(history.tasks),
        num_jobs=sum(known) if known else None,
        best_validation_loss=losses[0] if len(losses) == 1 else None,
        fraction_done=_mean_fraction(history, runs),
        problem="; ".join(f"task {run.root.name}: {run.problem}" for run in runs if run.problem),
    )


def _mean_fraction(history: QueueHistory, runs: Sequence[RunSummary]) -> float | None:
    fractions = [
        1.0 if task.state is TaskStage.FINISHED else run.fraction_done or 0.0
        for task, run in zip(history.tasks.values(), runs, strict=True)
    ]
    return sum(fractions) / len(fractions) if fractions else None


def _is_queue(root: Path) -> bool:
    try:
        return QueueDir.exists(root)
    except OSError:
        return False


def _is_run(root: Path) -> bool:
    """Return whether the folder belongs to a run or queue, which may be damaged."""
    run = RunDir(root)
    try:
        if run.journal_file.exists() or QueueDir.exists(root):
            return True
        return run.task_file.is_file() and (root / "jobs").is_dir()
    except OSError:  # a folder of another user
        return False


def _started_at(root: Path) -> float:
    """Return when the run began, in unix seconds: the time of the first journal line, else of the folder."""
    with contextlib.suppress(OSError), open_regular(RunDir(root).journal_file) as journal:
        if (first := _FIRST_TIME.match(journal.read(100))) is not None:
            return float(first[1])
    with contextlib.suppress(OSError):
        return root.stat().st_mtime
    return 0.0
