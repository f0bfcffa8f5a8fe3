"""One task on several GPUs of this machine: as many processes, each a rank, watched by this one."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from alto.cluster import Cluster, ExecutorEnded, Launch, Outcome, Told, error_class, open_cluster
from alto.data import read_task_rows
from alto.engine.runner import portable
from alto.engine.work import PLAN, PLAN_ANEW, PLAN_FILE, TRAIN
from alto.errors import AltoError, ProfileError, RunError, RunNotFoundError, TaskInterruptedError
from alto.executor import read_refusal
from alto.records import Gpu, TaskPlan, TaskResult
from alto.runs import (
    Event,
    Observer,
    RunDir,
    has_result,
    load_run_task,
    read_history,
    read_intact_events,
    task_result,
)
from alto.spec import Task
from alto.trackers import chosen_trackers

__all__ = ["LaunchedRunner"]

MAX_ATTEMPTS = 3
"""A rank that is killed, hangs, or runs out of memory ends all of them. They are started again until so many attempts
in a row have come no further."""

POLL_S = 0.2


class LaunchedRunner:
    """Trains tasks by adapter parallelism; arguments as :class:`alto.Engine` takes them."""

    def __init__(self, *, observers: Sequence[Observer], is_interrupted: Callable[[], bool] | None) -> None:
        self._observers = tuple(observers)
        self._is_interrupted = is_interrupted or (lambda: False)

    def begin(self, task: Task, output_dir: Path) -> TaskResult:
        """Train ``task`` in a new run directory, of which nothing is left where the task is at fault and cannot
        begin."""
        chosen_trackers(task)
        read_task_rows(task)  # what is wrong with them is found sooner here
        is_new = not output_dir.exists()
        run_dir = RunDir.create(output_dir, portable(task))
        try:
            return self._train(run_dir, task)
        except (TaskInterruptedError, RunError):
            raise
        except (AltoError, KeyboardInterrupt):
            if not _events(run_dir):
                shutil.rmtree(run_dir.root, ignore_errors=True)
                if is_new:
                    with contextlib.suppress(OSError):
                        output_dir.rmdir()
            raise

    def resume(self, run_dir: RunDir, *, trust_remote_code: bool) -> TaskResult:
        """Train a run from its last checkpoint."""
        with run_dir.locked():
            # Under the lock: another process that works on the run would hold it for a while.
            task = load_run_task(run_dir, trust_remote_code=trust_remote_code)
        return self._train(run_dir, task)

    def plan(self, task: Task, *, refresh: bool) -> TaskPlan:
        """What ``task`` takes, measured by its ranks."""
        with tempfile.TemporaryDirectory(prefix="alto-plan-") as folder:
            run_dir = RunDir(Path(folder) / "run")
            run_dir.begin(portable(task))
            ended, _ = self._launch(PLAN_ANEW if refresh else PLAN, run_dir, task)
            if ended.outcome is Outcome.FINISHED:
                return TypeAdapter(TaskPlan).validate_json((run_dir.root / PLAN_FILE).read_bytes())
        if self._is_interrupted():
            raise KeyboardInterrupt
        raise _error(ended) or ProfileError(
            f"task {task.name!r}: expected to measure what it takes on {task.num_gpus} ranks, found {ended.reason}"
        )

    def _train(self, run_dir: RunDir, task: Task) -> TaskResult:
        ended, num_in_vain = self._launch(TRAIN, run_dir, task)
        if ended.outcome is Outcome.FINISHED or has_result(run_dir):
            result = task_result(read_history(run_dir.root), run_dir)
            return replace(result, notices=(ended.reason,) if ended.reason else ())
        error = _error(ended)
        if error is not None and (ended.outcome is Outcome.FAILED or isinstance(error, TaskInterruptedError)):
            raise error
        if self._is_interrupted():
            raise TaskInterruptedError(f"{ended.reason}; go on with: alto resume {run_dir.root}")
        times = f", {num_in_vain} times without coming further" if num_in_vain > 1 else ""
        raise error or RunError(
            f"expected {run_dir.root} to be trained, found that {ended.reason}{times}; "
            f"mend the cause, then go on with: alto resume {run_dir.root}"
        )

    def _launch(self, entry: str, run_dir: RunDir, task: Task) -> tuple[ExecutorEnded, int]:
        """How the last of its attempts ended, and how many in a row, that one included, have come no further."""
        relay = EventRelay(run_dir, self._observers)
        with contextlib.closing(open_cluster("local", total_gpus=task.num_gpus, entry=entry)) as cluster:
            (node,) = cluster.nodes
            gpus = tuple(Gpu(node.name, index) for index in node.gpus)
            num_in_vain = 0
            for attempt in itertools.count(1):
                before = Progress(run_dir)
                cluster.start(
                    Launch(
                        task=task.name,
                        run_dir=str(run_dir.root),
                        gpus=gpus,
                        attempt=attempt,
                        num_ranks=task.num_gpus,
                        trust_remote_code=task.trust_remote_code,
                    )
                )
                ended = self._watch(cluster, task, relay)
                num_in_vain = 0 if Progress(run_dir).is_beyond(before) else num_in_vain + 1
                if (
                    ended.outcome is not Outcome.LOST
                    or has_result(run_dir)
                    or self._is_interrupted()
                    or num_in_vain == MAX_ATTEMPTS
                ):
                    break
            return ended, num_in_vain

    def _watch(self, cluster: Cluster, task: Task, relay: EventRelay) -> ExecutorEnded:
        """Until the executor has ended."""
        is_stopping = False
        while True:
            for event in cluster.poll(POLL_S):
                if isinstance(event, Told):
                    relay.relay(event.event)
                elif isinstance(event, ExecutorEnded):
                    return event
            if not is_stopping and self._is_interrupted():
                is_stopping = True
                cluster.stop(task.name)


class EventRelay:
    """Tells observers what the executor of a run tells; where the run goes on, its past first."""

    def __init__(self, run_dir: RunDir, observers: Sequence[Observer]) -> None:
        self._run_dir = run_dir
        self._observers = observers
        self._has_told = False

    def relay(self, event: Event) -> None:
        """Pass on a line of the journal."""
        if event["event"] == "task_resumed" and not self._has_told:
            for resume_state in _events(self._run_dir)[: event["seq"]]:
                self._show({**resume_state, "replayed": True})
        self._has_told = True
        self._show(event)

    def _show(self, event: Event) -> None:
        for observer in self._observers:
            observer(event)


class Progress:
    """How far a run has come on disk."""

    def __init__(self, run_dir: RunDir) -> None:
        self._checkpoint = max(
            (event["seq"] for event in _events(run_dir) if event["event"] == "checkpoint"), default=0
        )
        refusal = read_refusal(run_dir)
        self._max_tokens = refusal["max_tokens_per_pass"] if refusal is not None else float("inf")

    def is_beyond(self, earlier: Progress) -> bool:
        """Whether an attempt that ends here may be told from the one before it: it has saved more, or has found out
        that passes must be shorter."""
        return self._checkpoint > earlier._checkpoint or self._max_tokens < earlier._max_tokens


def _events(run_dir: RunDir) -> Sequence[Event]:
    try:
        return read_intact_events(run_dir.journal_file)
    except RunNotFoundError:
        return []


def _error(ended: ExecutorEnded) -> AltoError | None:
    """The error that ended the executor, as it would have been raised here; None where it was no error of ALTO's."""
    found = error_class(ended.error)
    return found(ended.reason) if found is not None else None
