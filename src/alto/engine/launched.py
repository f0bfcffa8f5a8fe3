"""Trains one task on several GPUs of this machine: one process per rank, watched by this process."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from alto.base import note_resumption, resume_command, scratch_folder
from alto.cluster import (
    AttemptEnded,
    Controller,
    Outcome,
    Retrying,
    TaskTicket,
    error_class,
    open_cluster,
    running_controller,
)
from alto.data import read_task_rows
from alto.engine.runner import portable
from alto.engine.work import PLAN, PLAN_ANEW, PLAN_FILE, TRAIN
from alto.errors import AltoError, ProfileError, RunError, RunNotFoundError, TaskInterruptedError
from alto.executor import read_oom_record
from alto.records import TaskOutcome, TaskPlan
from alto.runs import (
    Journal,
    JournalEntry,
    Observer,
    RunDir,
    load_run_task,
    read_history,
    read_intact_entries,
    task_outcome,
)
from alto.runs.events import CheckpointSaved, MeasuringBegun, TaskRelayed, TaskResumed
from alto.scheduler.queue import QueueSettings
from alto.spec import Task
from alto.trackers import chosen_trackers

MAX_ATTEMPTS = 3
"""If one rank is killed, hangs, or runs out of memory, all ranks are stopped and restarted, until this many attempts in
a row have made no progress."""

_SETTINGS = QueueSettings(max_attempts=MAX_ATTEMPTS, backoff_s=0.0)


class LaunchedRunner:
    """Trains tasks by adapter parallelism; arguments as in :class:`alto.Engine`."""

    def __init__(self, *, observers: Sequence[Observer], is_interrupted: Callable[[], bool] | None) -> None:
        self._observers = tuple(observers)
        self._is_interrupted = is_interrupted or (lambda: False)

    def begin(self, task: Task, output_dir: Path) -> TaskOutcome:
        """Train ``task`` in a new run directory; if the task cannot start because of an error in it, delete the
        directory."""
        chosen_trackers(task)
        read_task_rows(task)  # finds errors in the rows before processes are started
        is_new = not output_dir.exists()
        run_dir = RunDir.create(output_dir, portable(task))
        try:
            return self._train(run_dir, task)
        except (TaskInterruptedError, RunError):
            raise
        except (AltoError, KeyboardInterrupt):
            if not _entries(run_dir):
                shutil.rmtree(run_dir.root, ignore_errors=True)
                if is_new:
                    with contextlib.suppress(OSError):
                        output_dir.rmdir()
            raise

    def resume(self, run_dir: RunDir, *, trust_remote_code: bool) -> TaskOutcome:
        """Train a run from its last checkpoint."""
        with run_dir.locked():
            # Under the lock, so that a run that another process works on is refused here.
            task = load_run_task(run_dir, trust_remote_code=trust_remote_code)
        return self._train(run_dir, task)

    def plan(self, task: Task, *, refresh: bool) -> TaskPlan:
        """Return the plan of ``task``, measured by its ranks."""
        with scratch_folder("alto-plan-") as folder:
            run_dir = RunDir(folder / "run")
            run_dir.begin(portable(task))
            ended, _ = self._launch(PLAN_ANEW if refresh else PLAN, run_dir, task)
            if ended.outcome is Outcome.FINISHED:
                return TypeAdapter(TaskPlan).validate_json((run_dir.root / PLAN_FILE).read_bytes())
        if self._is_interrupted():
            raise KeyboardInterrupt
        raise _error(ended) or ProfileError(
            f"task {task.name!r}: expected to measure its time and memory on {task.num_gpus} ranks, "
            f"found {ended.reason}"
        )

    def _train(self, run_dir: RunDir, task: Task) -> TaskOutcome:
        try:
            ended, num_in_vain = self._launch(TRAIN, run_dir, task)
        except KeyboardInterrupt as stop:
            if _entries(run_dir):
                note_resumption(stop, run_dir.root)
            raise
        if ended.outcome is Outcome.FINISHED:
            return replace(task_outcome(read_history(run_dir.root), run_dir), notices=ended.notices)
        error = _error(ended)
        if error is not None and (ended.outcome is Outcome.FAILED or isinstance(error, TaskInterruptedError)):
            raise error
        if self._is_interrupted():
            raise TaskInterruptedError(f"{ended.reason}; continue with: {resume_command(run_dir.root)}")
        times = f", {num_in_vain} times without progress" if num_in_vain > 1 else ""
        raise error or RunError(
            f"expected {run_dir.root} to be trained, found that {ended.reason}{times}; "
            f"fix the cause, then continue with: {resume_command(run_dir.root)}"
        )

    def _launch(self, host: str, run_dir: RunDir, task: Task) -> tuple[AttemptEnded, int]:
        """Run the task with executors, with retries; return how the last one ended, and how many in a row have made no
        progress, including that one."""
        relay = EventRelay(run_dir, self._observers)
        ticket = TaskTicket(
            task=task.name,
            run_dir=str(run_dir.root),
            host=host,
            num_gpus=task.num_gpus,
            is_parallel=True,
            trust_remote_code=task.needs_trust,
        )

        def begin(controller: Controller) -> None:
            controller.retry_by(Retrying(interrupted=False, progress_of=progress_of))
            controller.begin([ticket])

        with (
            scratch_folder("alto-control-") as folder,
            contextlib.closing(open_cluster("local", total_gpus=task.num_gpus)) as cluster,
            Journal(RunDir(folder).journal_file) as journal,
            running_controller(
                cluster, journal, _SETTINGS, begin=begin, show=relay.observe, is_interrupted=self._is_interrupted
            ) as controller,
        ):
            with contextlib.suppress(TaskInterruptedError):  # the outcome of the executor says more
                controller.wait()
            status = controller.status().tasks[task.name]
        assert status.ended is not None, "it was launched with all GPUs at once"
        return status.ended, status.num_failures


class EventRelay:
    """Shows observers the journal of a run that an executor writes; past entries of a resumed run come first."""

    def __init__(self, run_dir: RunDir, observers: Sequence[Observer]) -> None:
        self._run_dir = run_dir
        self._observers = observers
        self._has_begun = False

    def observe(self, relayed: JournalEntry) -> None:
        """Pass on the entry that a controller has relayed."""
        assert isinstance(relayed.event, TaskRelayed)
        entry = relayed.event.entry
        if isinstance(entry.event, TaskResumed) and not self._has_begun:
            for earlier in _entries(self._run_dir)[: entry.seq]:
                self._show(replace(earlier, is_replayed=True))
        self._has_begun = self._has_begun or not isinstance(entry.event, MeasuringBegun)
        self._show(entry)

    def _show(self, entry: JournalEntry) -> None:
        for observer in self._observers:
            observer(entry)


def progress_of(run_dir: RunDir) -> tuple[float, float]:
    """Return the progress of a run on disk: its last checkpoint, and the negative limit of its micro-batches. An
    attempt that changes one of the two has made progress."""
    checkpoints = (entry.seq for entry in _entries(run_dir) if isinstance(entry.event, CheckpointSaved))
    oom_record = read_oom_record(run_dir)
    max_tokens = oom_record["max_tokens_per_pass"] if oom_record is not None else float("inf")
    return max(checkpoints, default=0), -max_tokens


def _entries(run_dir: RunDir) -> Sequence[JournalEntry]:
    """Return the intact journal entries of the run; an empty list if there is no journal, or if the journal has only
    measurement events."""
    try:
        entries = read_intact_entries(run_dir.journal_file)
    except RunNotFoundError:
        return []
    return [] if all(isinstance(entry.event, MeasuringBegun) for entry in entries) else entries


def _error(ended: AttemptEnded) -> AltoError | None:
    """Return the error that ended the executor as its own class; None if it was not an error of ALTO."""
    found = error_class(ended.error)
    return found(ended.reason) if found is not None else None
