"""Whatever happens in whatever order: no GPU has two tasks, quotas hold, nothing is lost."""

from __future__ import annotations

from budgets import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from alto.records import Gpu, Node
from alto.scheduler import TaskDemand, schedule_tasks
from alto.scheduler.queue import (
    Failed,
    Finished,
    GaveUp,
    GpuAdded,
    GpuLost,
    Planned,
    Progressed,
    Queue,
    QueueEvent,
    QueueSettings,
    Started,
    StartTask,
    Stopped,
    Submitted,
    TaskState,
    Woken,
)

GPUS = [Gpu("x", 0), Gpu("x", 1), Gpu("x", 2), Gpu("y", 0), Gpu("y", 1)]
QUOTA = 2
TRIGGERS = (Submitted, Finished, Failed, GpuLost, GpuAdded)
durations = st.floats(1, 100)


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        nodes = [Node(name="x", gpus=(0, 1, 2)), Node(name="y", gpus=(0, 1))]
        # With a few tasks plans are whole, with more they are of what starts now.
        settings = QueueSettings(quotas={"t": QUOTA}, max_planned=3)
        self.queue = Queue(nodes, settings, lambda problem, _: schedule_tasks(problem, method="lpt"))
        self.now_s = 0.0
        self.there = set(GPUS)
        self.running: dict[str, StartTask] = {}
        self.attempts: dict[str, int] = {}

    def tell(self, *events: QueueEvent) -> None:
        num_waiting = sum(task.state is TaskState.WAITING for task in self.queue.tasks.values())
        actions = self.queue.apply(*events)
        for action in actions:
            if isinstance(action, StartTask):
                assert action.task not in self.running
                assert action.attempt == self.attempts.get(action.task, 0) + 1
                assert set(action.gpus) <= self.there
                self.running[action.task] = action
                self.attempts[action.task] = action.attempt
            assert not (isinstance(action, GaveUp) and action.task in self.running)
        planned = [action for action in actions if isinstance(action, Planned)]
        assert len(planned) <= 1
        assert all(action.reason for action in planned)
        if any(isinstance(action, StartTask) for action in actions) and isinstance(events[0], TRIGGERS) and num_waiting:
            assert planned

    @rule(
        num_gpus=st.integers(1, 5), duration_s=durations, release_s=st.floats(0, 50), tenant=st.sampled_from(["t", "u"])
    )
    def submit(self, num_gpus: int, duration_s: float, release_s: float, tenant: str) -> None:
        demand = TaskDemand(
            task=f"t{len(self.queue.tasks)}",
            num_gpus=min(num_gpus, QUOTA) if tenant == "t" else num_gpus,
            duration_s=duration_s,
            release_s=self.now_s + release_s,
            tenant=tenant,
        )
        self.tell(Submitted(time_s=self.now_s, demand=demand))

    @rule(passed_s=durations)
    def time_micro_batches(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.tell(Woken(time_s=self.now_s))

    def one(self, data: st.DataObject) -> StartTask:
        return self.running[data.draw(st.sampled_from(sorted(self.running)))]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), remaining_s=st.floats(0, 1000))
    def progress(self, data: st.DataObject, remaining_s: float) -> None:
        run = self.one(data)
        self.tell(
            Started(time_s=self.now_s, task=run.task, attempt=run.attempt),
            Progressed(time_s=self.now_s, task=run.task, attempt=run.attempt, remaining_s=remaining_s),
        )

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        run = self.one(data)
        del self.running[run.task]
        self.tell(Finished(time_s=self.now_s, task=run.task, attempt=run.attempt))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), is_retryable=st.booleans())
    def fail(self, data: st.DataObject, is_retryable: bool) -> None:
        run = self.one(data)
        del self.running[run.task]
        self.tell(Failed(time_s=self.now_s, task=run.task, attempt=run.attempt, reason="x", is_retryable=is_retryable))

    @precondition(lambda self: self.queue.tasks)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        self.tell(Stopped(time_s=self.now_s, task=data.draw(st.sampled_from(sorted(self.queue.tasks)))))

    @rule(gpu=st.sampled_from(GPUS))
    def lose(self, gpu: Gpu) -> None:
        self.there.discard(gpu)
        self.tell(GpuLost(time_s=self.now_s, gpu=gpu))

    @rule(gpu=st.sampled_from(GPUS))
    def add(self, gpu: Gpu) -> None:
        self.there.add(gpu)
        self.tell(GpuAdded(time_s=self.now_s, gpu=gpu))

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def late_news(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(sorted(self.attempts)))
        before = self.queue.tasks[task].state
        self.tell(Finished(time_s=self.now_s, task=task, attempt=self.attempts[task] - 1))
        assert self.queue.tasks[task].state is before

    @invariant()
    def no_gpu_has_two_tasks(self) -> None:
        taken = [gpu for run in self.running.values() for gpu in run.gpus]
        assert len(taken) == len(set(taken))

    @invariant()
    def running_tasks_stay_where_they_are(self) -> None:
        assert {task.name: task.gpus for task in self.queue.tasks.values() if task.has_gpus} == {
            name: run.gpus for name, run in self.running.items()
        }

    @invariant()
    def quotas_hold(self) -> None:
        tenant_of = {task.name: task.demand.tenant for task in self.queue.tasks.values()}
        assert sum(len(run.gpus) for name, run in self.running.items() if tenant_of[name] == "t") <= QUOTA

    def teardown(self) -> None:
        """Once the world cooperates, every task ends."""
        for gpu in GPUS:
            self.add(gpu)
        for _ in range(3 * len(self.queue.tasks) + 3):
            for run in list(self.running.values()):
                del self.running[run.task]
                self.tell(Finished(time_s=self.now_s, task=run.task, attempt=run.attempt))
            if not self.running:
                if self.queue.next_wake_s is None:
                    break
                self.now_s = max(self.now_s, self.queue.next_wake_s)
                self.tell(Woken(time_s=self.now_s))
        assert all(task.has_ended for task in self.queue.tasks.values())


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=examples(50), stateful_step_count=30)
