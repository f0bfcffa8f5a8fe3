"""Events in any order, for tasks alone and for tasks that share: no GPU has two executors, quotas hold, nothing is
lost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from budgets import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sharing_problems import demand_of

from alto.records import Gpu, Node, Schedule
from alto.scheduler import SchedulingProblem, TaskDemand, check_schedule, schedule_tasks
from alto.scheduler.queue import (
    Action,
    Cancelled,
    Failed,
    Finished,
    GaveUp,
    GpuAdded,
    GpuLost,
    Planned,
    Progressed,
    Queue,
    QueueInput,
    QueueSettings,
    Started,
    StartTask,
    Submitted,
    TaskState,
    Woken,
)

TRIGGERS = (Submitted, Finished, Failed, GpuLost, GpuAdded)
seconds = st.floats(1, 100)


class World(RuleBasedStateMachine):
    """A queue, and the state of the tasks that it has started; both state machines share it."""

    nodes: Sequence[Node]
    quota: int
    max_planned: int

    def __init__(self, solve: Callable[[SchedulingProblem, Schedule | None], Schedule]) -> None:
        super().__init__()
        settings = QueueSettings(quotas={"t": self.quota}, max_planned=self.max_planned)
        self.queue = Queue(self.nodes, settings, solve)
        self.now_s = 0.0
        self.there = set(self.gpus())
        self.running: dict[str, StartTask] = {}
        self.attempts: dict[str, int] = {}

    @classmethod
    def gpus(cls) -> list[Gpu]:
        return [Gpu(node.name, index) for node in cls.nodes for index in node.gpus]

    def tell(self, *events: QueueInput) -> Sequence[Action]:
        actions = self.queue.apply(*events)
        for action in actions:
            self.check(action)
            if isinstance(action, StartTask):
                assert action.task not in self.running
                assert action.attempt == self.attempts.get(action.task, 0) + 1
                assert set(action.gpus) <= self.there
                self.running[action.task] = action
                self.attempts[action.task] = action.attempt
        return actions

    def check(self, action: Action) -> None:
        """Check the invariants of the machine's own tasks, before a starting task counts as running."""

    def end(self, *runs: StartTask) -> None:
        for run in runs:
            del self.running[run.task]

    @rule(passed_s=seconds)
    def time_passes(self, passed_s: float) -> None:
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
        self.end(run)
        self.tell(Finished(time_s=self.now_s, task=run.task, attempt=run.attempt))

    @precondition(lambda self: self.queue.tasks)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        self.tell(Cancelled(time_s=self.now_s, task=data.draw(st.sampled_from(sorted(self.queue.tasks)))))

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        self.bring(data.draw(st.sampled_from(self.gpus())))

    def bring(self, gpu: Gpu) -> None:
        self.there.add(gpu)
        self.tell(GpuAdded(time_s=self.now_s, gpu=gpu))

    def teardown(self) -> None:
        """Check that every task ends once everything works."""
        for gpu in self.gpus():
            self.bring(gpu)
        for _ in range(3 * len(self.queue.tasks) + 3):
            for run in list(self.running.values()):
                self.end(run)
                self.tell(Finished(time_s=self.now_s, task=run.task, attempt=run.attempt))
            if not self.running:
                if self.queue.next_wake_s is None:
                    break
                self.now_s = max(self.now_s, self.queue.next_wake_s)
                self.tell(Woken(time_s=self.now_s))
        assert all(task.has_ended for task in self.queue.tasks.values())


class QueueMachine(World):
    nodes = (Node(name="x", gpus=(0, 1, 2)), Node(name="y", gpus=(0, 1)))
    quota = 2
    max_planned = 3  # With few tasks plans are complete, with more they cover only what starts now.

    def __init__(self) -> None:
        super().__init__(lambda problem, _: schedule_tasks(problem, method="lpt"))

    def tell(self, *events: QueueInput) -> Sequence[Action]:
        num_waiting = sum(task.state is TaskState.WAITING for task in self.queue.tasks.values())
        actions = super().tell(*events)
        planned = [action for action in actions if isinstance(action, Planned)]
        assert len(planned) <= 1
        assert all(action.reason for action in planned)
        if any(isinstance(action, StartTask) for action in actions) and isinstance(events[0], TRIGGERS) and num_waiting:
            assert planned
        return actions

    def check(self, action: Action) -> None:
        assert not (isinstance(action, GaveUp) and action.task in self.running)

    @rule(
        num_gpus=st.integers(1, 5), duration_s=seconds, release_s=st.floats(0, 50), tenant=st.sampled_from(["t", "u"])
    )
    def submit(self, num_gpus: int, duration_s: float, release_s: float, tenant: str) -> None:
        demand = TaskDemand(
            task=f"t{len(self.queue.tasks)}",
            num_gpus=min(num_gpus, self.quota) if tenant == "t" else num_gpus,
            duration_s=duration_s,
            release_s=self.now_s + release_s,
            tenant=tenant,
        )
        self.tell(Submitted(time_s=self.now_s, demand=demand))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), is_retryable=st.booleans())
    def fail(self, data: st.DataObject, is_retryable: bool) -> None:
        run = self.one(data)
        self.end(run)
        self.tell(Failed(time_s=self.now_s, task=run.task, attempt=run.attempt, reason="x", is_retryable=is_retryable))

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        gpu = data.draw(st.sampled_from(self.gpus()))
        self.there.discard(gpu)
        self.tell(GpuLost(time_s=self.now_s, gpu=gpu))

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def late_event(self, data: st.DataObject) -> None:
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
        assert sum(len(run.gpus) for name, run in self.running.items() if tenant_of[name] == "t") <= self.quota


def solve(problem: SchedulingProblem, hint: Schedule | None) -> Schedule:
    schedule = schedule_tasks(problem, method="lpt", hint=hint)
    check_schedule(problem, schedule)
    return schedule


class SharingMachine(World):
    nodes = (Node(name="x", gpus=(0, 1)), Node(name="y", gpus=(0,)))
    quota = 1
    max_planned = 8

    def __init__(self) -> None:
        super().__init__(solve)
        self.ended: set[str] = set()
        self.suspect: set[str] = set()  # executors of which a task was lost
        self.lost: set[str] = set()  # tasks that were lost beside others

    def check(self, action: Action) -> None:
        if isinstance(action, StartTask):
            assert action.executor not in self.ended, "an executor that has ended does not come back"
            task = self.queue.tasks[action.task]
            assert task.executor == action.executor
            if task.demand.sharing is None or action.task in self.lost:
                assert action.executor == ""
            else:
                assert action.executor
        if isinstance(action, Planned):
            assert action.schedule.makespan_s >= action.schedule.bound_s * (1 - 1e-9)

    def end(self, *runs: StartTask) -> None:
        super().end(*runs)
        self.ended |= {run.executor for run in runs} - {run.executor for run in self.running.values()} - {""}

    def beside(self, run: StartTask) -> list[StartTask]:
        return [other for other in self.running.values() if run.executor and other.executor == run.executor]

    @rule(
        num_gpus=st.sampled_from([1, 1, 1, 2]),
        duration_s=seconds,
        step_share=st.sampled_from([0.0, 0.5, 0.9]),
        base=st.sampled_from(["a", "a", "b", ""]),
        tenant=st.sampled_from(["t", "u", "v"]),
        priority=st.sampled_from([0, 0, 0, 1]),
        later_s=st.sampled_from([0.0, 0.0, 30.0]),
        count=st.integers(1, 3),
    )
    def submit(
        self, num_gpus: int, duration_s: float, step_share: float, base: str, count: int, later_s: float, **more: object
    ) -> None:
        release_s = self.now_s + later_s
        demands: list[TaskDemand] = []
        for number in range(len(self.queue.tasks), len(self.queue.tasks) + count):
            if base and num_gpus == 1:
                step_s = step_share * duration_s
                more_of = {"base": base, "num_slots": 3, "capacity_bytes": 20, "release_s": release_s, **more}
                demands.append(demand_of(f"t{number}", duration_s, step_s, **more_of))
            else:
                num_gpus = 1 if more["tenant"] == "t" else num_gpus
                demand = TaskDemand(task=f"t{number}", num_gpus=num_gpus, duration_s=duration_s, release_s=release_s)
                demands.append(demand)
        self.tell(*(Submitted(time_s=self.now_s, demand=demand) for demand in demands))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail_alone(self, data: st.DataObject) -> None:
        run = self.one(data)
        self.end(run)
        self.tell(Failed(time_s=self.now_s, task=run.task, attempt=run.attempt, reason="x", is_retryable=False))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), at_once=st.booleans())
    def crash(self, data: st.DataObject, at_once: bool) -> None:
        run = self.one(data)
        runs = self.beside(run) or [run]
        failed = [
            Failed(time_s=self.now_s, task=found.task, attempt=found.attempt, reason="killed", is_retryable=True)
            for found in runs
        ]
        was_stopping = any(self.queue.tasks[found.task].state is TaskState.STOPPING for found in runs)
        is_lost = run.executor in self.suspect
        for number, found in enumerate(runs):
            task = self.queue.tasks[found.task]
            others = len(runs) - number if at_once else len(self.beside(found))
            if task.state is not TaskState.STOPPING and not task.has_lost_gpu:
                if is_lost or others > 1:
                    self.lost.add(task.name)
                is_lost = True
                self.suspect |= {run.executor} - {""}
            if not at_once:
                self.end(found)
                self.tell(failed[number])
                newcomers = {other.task for other in self.beside(run)} - {other.task for other in runs}
                assert not newcomers or was_stopping, "nobody joins an executor that is being lost"
        if at_once:
            self.end(*runs)
            self.tell(*failed)

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        gpu = data.draw(st.sampled_from(self.gpus()))
        if gpu not in self.there:
            return
        self.there.discard(gpu)
        runs = [run for run in self.running.values() if gpu in run.gpus]
        for name in list(self.lost):
            task = self.queue.tasks[name]
            pauses = task.state is TaskState.WAITING and task.ready_s >= self.now_s and not task.has_lost_gpu
            if pauses and gpu in task.gpus and task.isolated_by == task.attempt:
                self.lost.discard(name)  # the GPU was the cause, not a neighbour
        self.end(*runs)
        self.tell(
            GpuLost(time_s=self.now_s, gpu=gpu),
            *(
                Failed(time_s=self.now_s, task=run.task, attempt=run.attempt, reason="gone", is_retryable=True)
                for run in runs
            ),
        )

    @invariant()
    def no_gpu_has_two_executors(self) -> None:
        on_gpu: dict[Gpu, set[str]] = {}
        for run in self.running.values():
            for gpu in run.gpus:
                on_gpu.setdefault(gpu, set()).add(run.executor or f"of {run.task}")
        assert all(len(executors) == 1 for executors in on_gpu.values())
        of_executor: dict[str, set[tuple[Gpu, ...]]] = {}
        for run in self.running.values():
            of_executor.setdefault(run.executor or f"of {run.task}", set()).add(run.gpus)
        assert all(len(gpus) == 1 for gpus in of_executor.values())

    @invariant()
    def free_gpus_are_those_that_no_task_has(self) -> None:
        taken = {gpu for run in self.running.values() for gpu in run.gpus}
        assert self.queue._pool.free == self.there - taken

    @invariant()
    def tasks_that_share_are_alike_and_fit(self) -> None:
        by_executor = itertools.groupby(
            sorted((run.executor, run.task) for run in self.running.values() if run.executor), key=lambda pair: pair[0]
        )
        for _, pairs in by_executor:
            demands = [self.queue.tasks[task].demand for _, task in pairs]
            assert len({(demand.priority, demand.tenant == "t") for demand in demands}) == 1
            sharings = [demand.sharing for demand in demands if demand.sharing is not None]
            assert len(sharings) == len(demands)
            assert len({sharing.base for sharing in sharings}) == 1
            assert len(sharings) <= 3, "10 bytes, and 3 slots of 1 for each"

    @invariant()
    def quotas_hold(self) -> None:
        theirs = {run.gpus for name, run in self.running.items() if self.queue.tasks[name].demand.tenant == "t"}
        assert len(theirs) <= self.quota

    @invariant()
    def expected_ends_are_finite(self) -> None:
        for name in self.running:
            task = self.queue.tasks[name]
            assert task.started_s <= task.expected_end_s < 1e9

    def teardown(self) -> None:
        """Check that all GPUs are free at the end, too."""
        super().teardown()
        assert self.queue._pool.free == set(self.gpus())
        assert not +self.queue._executors.in_use


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=examples(50), stateful_step_count=30)
TestSharingMachine = SharingMachine.TestCase
TestSharingMachine.settings = settings(max_examples=examples(40), stateful_step_count=30)
