"""A cluster without processes, on a clock that a test moves; the test sets durations and ends of executors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from journals import event

from alto.cluster import AttemptEnded, ClusterEvent, Launch, Outcome
from alto.records import Node
from alto.runs import Journal, RunDir

NODE = Node(name="n", gpus=(0, 1))


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class FakeCluster:
    """A cluster whose executors take ``seconds`` of the clock and end with the ``outcomes``, one by one, and then
    finish."""

    clock: Clock
    seconds: dict[str, float]
    outcomes: dict[str, deque[Outcome]] = field(default_factory=dict)
    script: Callable[[FakeCluster], Iterable[ClusterEvent]] = lambda cluster: ()
    launches: list[Launch] = field(default_factory=list)
    running: dict[str, tuple[float, Launch]] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    leaves_results: bool = False

    nodes: Sequence[Node] = (NODE,)
    has_gpus = False

    def start(self, launch: Launch) -> None:
        taken = {gpu for _, other in self.running.values() for gpu in other.gpus}
        assert taken.isdisjoint(launch.gpus)
        assert launch.task not in self.running
        self.launches.append(launch)
        self.running[launch.task] = (self.clock() + self.seconds[launch.task], launch)

    def stop(self, task: str) -> None:
        self.stopped.append(task)

    def poll(self, timeout_s: float) -> list[ClusterEvent]:
        self.clock.now_s += timeout_s or 0.01
        events = list(self.script(self))
        for task, (ends_at, launch) in list(self.running.items()):
            if task in self.stopped:
                events.append(self.end(launch, Outcome.INTERRUPTED))
            elif ends_at <= self.clock():
                left = self.outcomes.get(task)
                events.append(self.end(launch, left.popleft() if left else Outcome.FINISHED))
        return events

    def end(self, launch: Launch, outcome: Outcome) -> AttemptEnded:
        del self.running[launch.task]
        if launch.task in self.stopped:
            self.stopped.remove(launch.task)
        if outcome is Outcome.FINISHED and self.leaves_results:
            leave_result(Path(launch.run_dir))
        reason = "" if outcome is Outcome.FINISHED else f"was {outcome.value}"
        return AttemptEnded(task=launch.task, attempt=launch.attempt, outcome=outcome, reason=reason)

    def close(self) -> None:
        self.running.clear()


def leave_result(run_dir: Path, **facts: Any) -> None:
    run = RunDir(run_dir)
    with Journal(run.journal_file) as journal:
        journal.append(event("task_completed", best_job="job-000", samples_trained=1, samples_budgeted=1, **facts))
    run.best.mkdir()
