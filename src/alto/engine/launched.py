"""One task on several GPUs of this machine: as many processes, each a rank, watched by this one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from pydantic import TypeAdapter

from alto import errors
from alto.cluster import Cluster, ExecutorEnded, Launch, Outcome, Told, open_cluster
from alto.data import read_task_rows
from alto.engine.runner import portable
from alto.engine.work import PLAN, PLAN_ANEW, PLAN_FILE, TRAIN
from alto.errors import AltoError, ProfileError, RunError, TaskInterruptedError
from alto.records import Gpu, TaskPlan, TaskResult
from alto.runs import Event, Observer, RunDir, read_history, read_intact_events, task_result
from alto.spec import Task, load_task
from alto.trackers import chosen_trackers

__all__ = ["LaunchedRunner"]

MAX_ATTEMPTS = 3
"""A rank that is killed, hangs, or runs out of memory ends all of them; they are started again so often."""

POLL_S = 0.2


class LaunchedRunner:
    """Trains tasks by adapter parallelism; arguments as :class:`alto.Engine` takes them."""

    def __init__(self, *, observers: Sequence[Observer], is_interrupted: Callable[[], bool] | None) -> None:
        self._observers = tuple(observers)
        self._is_interrupted = is_interrupted or (lambda: False)

    def begin(self, task: Task, output_dir: Path) -> TaskResult:
        """Train ``task`` in a new run directory, of which nothing is left where it could not begin."""
        chosen_trackers(task)
        read_task_rows(task)  # what is wrong with them is found sooner here
        run_dir = RunDir.create(output_dir, portable(task))
        try:
            return self._train(run_dir, task)
        except BaseException:
            if not read_intact_events(run_dir.journal_file):
                shutil.rmtree(run_dir.root, ignore_errors=True)
            raise

    def go_on(self, run_dir: RunDir) -> TaskResult:
        """Train a run from its last checkpoint."""
        for event in read_intact_events(run_dir.journal_file):
            self._show({**event, "replayed": True})
        return self._train(run_dir, load_task(run_dir.task_file))

    def plan(self, task: Task, *, refresh: bool) -> TaskPlan:
        """What ``task`` takes, measured by its ranks."""
        with tempfile.TemporaryDirectory(prefix="alto-plan-") as folder:
            run_dir = RunDir(Path(folder) / "run")
            run_dir.begin(portable(task))
            ended = self._launch(PLAN_ANEW if refresh else PLAN, run_dir, task)
            if ended.outcome is Outcome.FINISHED:
                return TypeAdapter(TaskPlan).validate_json((run_dir.root / PLAN_FILE).read_bytes())
        if ended.outcome is Outcome.INTERRUPTED:
            raise KeyboardInterrupt
        raise _error(ended) or ProfileError(
            f"task {task.name!r}: expected to measure what it takes on {task.num_gpus} ranks, found {ended.reason}"
        )

    def _train(self, run_dir: RunDir, task: Task) -> TaskResult:
        ended = self._launch(TRAIN, run_dir, task)
        if ended.outcome is Outcome.FINISHED:
            return task_result(read_history(run_dir.root), run_dir)
        if ended.outcome is Outcome.INTERRUPTED:
            raise TaskInterruptedError(ended.reason)
        raise _error(ended) or RunError(
            f"expected {run_dir.root} to be trained, found that {ended.reason} ({MAX_ATTEMPTS} attempts); mend the "
            f"cause, then go on with: alto resume {run_dir.root}"
        )

    def _launch(self, entry: str, run_dir: RunDir, task: Task) -> ExecutorEnded:
        """How the last of its attempts ended."""
        with closing(open_cluster("local", total_gpus=task.num_gpus, entry=entry)) as cluster:
            (node,) = cluster.nodes
            gpus = tuple(Gpu(node.name, index) for index in node.gpus)
            for attempt in range(1, MAX_ATTEMPTS + 1):
                cluster.start(
                    Launch(
                        task=task.name,
                        run_dir=str(run_dir.root),
                        gpus=gpus,
                        attempt=attempt,
                        num_ranks=task.num_gpus,
                    )
                )
                ended = self._watch(cluster, task)
                if ended.outcome is not Outcome.LOST:
                    break
            return ended

    def _watch(self, cluster: Cluster, task: Task) -> ExecutorEnded:
        """Until the executor has ended."""
        is_stopping = False
        while True:
            for event in cluster.poll(POLL_S):
                if isinstance(event, Told):
                    self._show(event.event)
                elif isinstance(event, ExecutorEnded):
                    return event
            if not is_stopping and self._is_interrupted():
                is_stopping = True
                cluster.stop(task.name)

    def _show(self, event: Event) -> None:
        for observer in self._observers:
            observer(event)


def _error(ended: ExecutorEnded) -> AltoError | None:
    """The error that ended the executor, as it would have been raised here; None where it was no error of ALTO's."""
    found = getattr(errors, ended.error, None) if ended.error else None
    return found(ended.reason) if isinstance(found, type) and issubclass(found, AltoError) else None
