"""The controller, with a cluster that does as it is told: what it launches, journals, and never does twice."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tiny import make_task

from alto.cluster import ClusterEvent, Controller, ExecutorEnded, GpuCame, GpuGone, Launch, Outcome, Told
from alto.errors import TaskInterruptedError
from alto.records import Gpu, Node
from alto.runs import Journal, QueueDir, QueueEntry, TaskStage, read_events, read_queue_history
from alto.scheduler import schedule_tasks
from alto.scheduler.queue import Queue, QueueSettings

NODE = Node(name="n", gpus=(0, 1))
SETTINGS = QueueSettings(backoff_s=2.0, max_attempts=3)


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class FakeCluster:
    """Executors that take ``seconds`` of the clock and end as ``outcomes`` say, one by one; then they finish."""

    clock: Clock
    seconds: dict[str, float]
    outcomes: dict[str, deque[Outcome]] = field(default_factory=dict)
    script: Callable[[FakeCluster], Iterable[ClusterEvent]] = lambda cluster: ()
    launches: list[Launch] = field(default_factory=list)
    running: dict[str, tuple[float, Launch]] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)

    nodes: Sequence[Node] = (NODE,)
    has_gpus = False

    def start(self, launch: Launch) -> None:
        taken = {gpu for _, other in self.running.values() for gpu in other.gpus}
        assert taken.isdisjoint(launch.gpus)
        self.launches.append(launch)
        self.running[launch.task] = (self.clock() + self.seconds[launch.task], launch)

    def stop(self, task: str) -> None:
        self.stopped.append(task)

    def poll(self, timeout_s: float) -> list[ClusterEvent]:
        self.clock.now_s += timeout_s or 0.01
        events = list(self.script(self))
        for task, (ends_at, launch) in list(self.running.items()):
            if task in self.stopped:
                events.append(self._end(launch, Outcome.INTERRUPTED))
            elif ends_at <= self.clock():
                left = self.outcomes.get(task)
                events.append(self._end(launch, left.popleft() if left else Outcome.FINISHED))
        return events

    def _end(self, launch: Launch, outcome: Outcome) -> ExecutorEnded:
        del self.running[launch.task]
        reason = "" if outcome is Outcome.FINISHED else f"was {outcome.value}"
        return ExecutorEnded(task=launch.task, attempt=launch.attempt, outcome=outcome, reason=reason)

    def close(self) -> None:
        self.running.clear()


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
        self.told: list[dict[str, Any]] = []

    def run(self, *, done: Iterable[str] = (), is_interrupted: Callable[[], bool] | None = None) -> None:
        queue = Queue((NODE,), SETTINGS, lambda problem, hint: schedule_tasks(problem, method="lpt"))
        past = read_events(self.queue_dir.run.journal_file)
        with Journal(self.queue_dir.run.journal_file, [self.told.append], past=past) as journal:
            journal.append(
                "queue_resumed" if past else "queue_started",
                nodes=[{"name": "n", "gpus": [0, 1]}],
                tasks=[{"task": e.task, "num_gpus": e.num_gpus, "duration_s": e.duration_s} for e in self.entries],
            )
            Controller(
                self.entries,
                queue,
                self.cluster,
                queue_dir=self.queue_dir,
                journal=journal,
                done=done,
                observers=[self.told.append],
                is_interrupted=is_interrupted,
                clock=self.clock,
            ).run()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.queue_dir.run.journal_file) if event["event"] == kind]

    @property
    def starts(self) -> Counter[str]:
        return Counter(launch.task for launch in self.cluster.launches)


def test_every_task_is_launched_once_and_finishes(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"a": 5.0, "b": 3.0, "c": 4.0}, num_gpus={"c": 2})
    bench.run()
    assert bench.starts == {"a": 1, "b": 1, "c": 1}
    assert [event["outcome"] for event in bench.events("executor_ended")] == ["finished"] * 3
    history = read_queue_history(bench.queue_dir.root)
    assert {task.state for task in history.tasks.values()} == {TaskStage.FINISHED}
    assert all(Path(launch.run_dir) == bench.queue_dir.run_of(launch.task).root for launch in bench.cluster.launches)
    assert bench.events("planned")[0]["reason"]


def test_a_lost_executor_is_tried_again_after_a_pause_and_others_go_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"a": 5.0, "b": 5.0})
    bench.cluster.outcomes["a"] = deque([Outcome.LOST])
    bench.run()
    assert bench.starts == {"a": 2, "b": 1}
    first, second = (launch for launch in bench.cluster.launches if launch.task == "a")
    assert (first.attempt, second.attempt, second.run_dir) == (1, 2, first.run_dir)
    times = [event["time"] for event in bench.events("executor_started") if event["task"] == "a"]
    assert len(times) == 2


def test_what_fails_by_its_own_fault_is_given_up_at_once_and_others_go_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"a": 5.0, "b": 5.0})
    bench.cluster.outcomes["a"] = deque([Outcome.FAILED])
    bench.run()
    assert bench.starts == {"a": 1, "b": 1}
    (given_up,) = bench.events("task_given_up")
    assert given_up["task"] == "a"
    assert "was failed" in given_up["reason"]
    tasks = read_queue_history(bench.queue_dir.root).tasks
    assert (tasks["a"].state, tasks["b"].state) == (TaskStage.FAILED, TaskStage.FINISHED)


def test_what_is_lost_again_and_again_is_given_up(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"a": 1.0})
    bench.cluster.outcomes["a"] = deque([Outcome.LOST] * 10)
    bench.run()
    assert bench.starts == {"a": SETTINGS.max_attempts}


def test_tasks_with_a_result_are_not_run_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"a": 5.0, "b": 5.0})
    bench.run(done=["a"])
    assert bench.starts == {"b": 1}


def test_when_asked_to_stop_executors_save_and_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"a": 50.0, "b": 50.0, "c": 50.0})
    with pytest.raises(TaskInterruptedError, match=r"3 of 3 tasks still to finish.*alto resume"):
        bench.run(is_interrupted=lambda: bench.clock() > 110.0)
    assert sorted(bench.cluster.stopped) == ["a", "b"]
    assert not bench.cluster.running
    assert bench.events("queue_interrupted")[0]["open"] == ["a", "b", "c"]
    bench.cluster.stopped.clear()
    bench.run()
    assert {task.state for task in read_queue_history(bench.queue_dir.root).tasks.values()} == {TaskStage.FINISHED}


def test_a_task_whose_node_is_lost_runs_again_where_gpus_are(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"a": 20.0, "b": 20.0})

    def lose(cluster: FakeCluster) -> Iterable[ClusterEvent]:
        if cluster.clock() > 105.0 and cluster.script is lose:
            cluster.script = bring_back
            gone = next(launch for _, launch in cluster.running.values() if launch.gpus == (Gpu("n", 1),))
            yield cluster._end(gone, Outcome.LOST)
            yield GpuGone(gpu=Gpu("n", 1))

    def bring_back(cluster: FakeCluster) -> Iterable[ClusterEvent]:
        if cluster.clock() > 110.0:
            cluster.script = lambda cluster: ()
            yield GpuCame(gpu=Gpu("n", 1))

    bench.cluster.script = lose
    bench.run()
    assert sorted(bench.starts.values()) == [1, 2]
    assert [event["event"] for event in bench.events("gpu_lost") + bench.events("gpu_added")] == [
        "gpu_lost",
        "gpu_added",
    ]


def test_progress_moves_the_estimate_and_an_estimate_that_is_ten_times_wrong_is_planned_anew(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"a": 10.0, "b": 10.0, "c": 10.0, "d": 10.0})
    bench.cluster.seconds["a"] = 100.0
    jobs = [{"job": "job-000", "config": {}, "total_steps": 100, "samples_budgeted": 100}]

    def tell(cluster: FakeCluster) -> Iterable[ClusterEvent]:
        """Job a is as far as the time that has passed of its hundred seconds."""
        if "a" not in cluster.running:
            return
        ends_at, launch = cluster.running["a"]
        step = round(100 - (ends_at - cluster.clock()))
        if step <= 1:
            yield Told(task="a", attempt=1, event={"event": "task_started", "jobs": jobs, "time": 0.0})
        yield Told(
            task="a",
            attempt=launch.attempt,
            event={
                "event": "eval",
                "job": "job-000",
                "step": step,
                "train_ema": 1.0,
                "validation_loss": 1.0,
                "time": 0.0,
            },
        )

    bench.cluster.script = tell
    bench.run()
    moved = [event["reason"] for event in bench.events("planned") if "a is now thought to take" in event["reason"]]
    assert moved
    assert bench.starts == {"a": 1, "b": 1, "c": 1, "d": 1}
    lines = [event["line"] for event in bench.told if event["event"] == "told"]
    assert lines
    assert lines[0]["event"] == "task_started"


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_task_that_has_its_result_is_finished_however_its_executor_ended(
    is_interrupted: bool, tmp_path: Path
) -> None:
    bench = Bench(tmp_path, {"a": 3.0})
    bench.cluster.outcomes["a"] = deque([Outcome.LOST] * 3)
    run = bench.queue_dir.run_of("a")
    with Journal(run.journal_file) as journal:
        journal.append("task_completed", best_job="job-000")
    run.best.mkdir()
    if is_interrupted:
        with pytest.raises(TaskInterruptedError, match="with 0 of 1 tasks"):
            bench.run(is_interrupted=lambda: bool(bench.cluster.launches))
    else:
        bench.run()
    assert bench.starts == {"a": 1}
    (ended,) = bench.events("executor_ended")
    assert ended["outcome"] == "finished"
    assert ended["reason"].startswith("Ended after it had its result: was ")
    assert read_queue_history(bench.queue_dir.root).tasks["a"].state is TaskStage.FINISHED
