"""A queue of tasks on a fake cluster, and the controller that runs it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fake_cluster import NODE, Clock, FakeCluster
from journals import event
from tiny import make_task

from alto.cluster import Controller, Retrying, TaskTicket
from alto.runs import Journal, JournalEntry, QueueDir, QueueEntry, RunDir, read_events
from alto.runs.events import QueueResumed
from alto.scheduler import schedule_tasks
from alto.scheduler.queue import Queue, QueueSettings

SETTINGS = QueueSettings(backoff_s=2.0, max_attempts=3)


class Bench:
    """A queue of tasks, and the controller that runs it."""

    def __init__(self, folder: Path, seconds: dict[str, float], *, num_gpus: dict[str, int] | None = None) -> None:
        self.clock = Clock()
        self.cluster = FakeCluster(self.clock, dict(seconds))
        self.entries = [
            QueueEntry(task=task, num_gpus=(num_gpus or {}).get(task, 1), duration_s=duration_s)
            for task, duration_s in seconds.items()
        ]
        tasks = [make_task(folder, name=entry.task) for entry in self.entries]
        self.queue_dir = QueueDir.create(folder / "runs", self.entries, tasks, {"method": "lpt"})
        self.shown: list[JournalEntry] = []

    def run(self, *, done: Iterable[str] = (), is_interrupted: Callable[[], bool] = lambda: False) -> None:
        """Run until every task has ended."""
        with self.controller(done=done, is_interrupted=is_interrupted) as controller:
            controller.wait()

    @contextlib.contextmanager
    def controller(
        self,
        *,
        done: Iterable[str] = (),
        is_interrupted: Callable[[], bool] = lambda: False,
        retrying: Retrying | None = None,
    ) -> Iterator[Controller]:
        """Return a controller, not started, that has the tasks except those that are ``done``."""
        queue = Queue((NODE,), SETTINGS, lambda problem, hint: schedule_tasks(problem, method="lpt"))
        with Journal(self.queue_dir.run.journal_file) as journal:
            if journal.past:
                journal.append(QueueResumed(done=(), notes=()))
            else:
                tasks = [{"task": e.task, "num_gpus": e.num_gpus, "duration_s": e.duration_s} for e in self.entries]
                nodes = [{"name": "n", "gpus": [0, 1]}]
                journal.append(event("queue_started", method="lpt", devices="gpus", nodes=nodes, tasks=tasks))
            with Controller(
                self.cluster,
                queue,
                journal,
                show=self.shown.append,
                is_interrupted=is_interrupted,
                clock=self.clock,
            ) as controller:
                controller.retry_by(retrying or Retrying())
                controller.begin([self.ticket_of(e) for e in self.entries if e.task not in set(done)])
                yield controller

    def ticket_of(self, entry: QueueEntry) -> TaskTicket:
        return TaskTicket.of(entry, run_dir=str(self.queue_dir.run_of(entry.task).root), host="none:none")

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.queue_dir.run.journal_file) if event["event"] == kind]

    @property
    def starts(self) -> Counter[str]:
        return Counter(launch.task for launch in self.cluster.launches)


def new_run(bench: Bench, name: str, seconds: float = 5.0, **changes: Any) -> TaskTicket:
    """Return the folder of a run that is submitted to the queue in addition to its first tasks; its executor takes
    ``seconds``."""
    bench.cluster.seconds[name] = seconds
    run = RunDir(bench.queue_dir.root / "tasks" / name)
    run.begin(make_task(bench.queue_dir.root.parent, name=name))
    return TaskTicket(task=name, run_dir=str(run.root), host="none:none", **{"duration_s": seconds} | changes)
