"""The queue with tasks that share executors."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sharing_problems import demand_of

from alto.records import Gpu, Node, Schedule
from alto.scheduler import RunningTask, SchedulingProblem, TaskDemand, check_schedule, schedule_tasks
from alto.scheduler.queue import (
    Cancelled,
    Failed,
    Finished,
    GpuAdded,
    GpuLost,
    Planned,
    Progressed,
    Queue,
    QueueSettings,
    Started,
    StartTask,
    StopTask,
    Submitted,
    TaskState,
    Woken,
)
from alto.scheduler.queue.events import Action

G0 = Gpu("n", 0)


class Seen:
    """A solver that records the problems it gets."""

    def __init__(self, method: str = "lpt") -> None:
        self.method = method
        self.problems: list[SchedulingProblem] = []

    def __call__(self, problem: SchedulingProblem, hint: Schedule | None) -> Schedule:
        self.problems.append(problem)
        schedule = schedule_tasks(problem, method=self.method, hint=hint)
        check_schedule(problem, schedule)
        return schedule

    @property
    def running(self) -> dict[str, RunningTask]:
        return {task.task: task for task in self.problems[-1].running}


def queue_of(num_gpus: int = 1, method: str = "lpt", **settings: object) -> tuple[Queue, Seen]:
    seen = Seen(method)
    return Queue([Node(name="n", gpus=tuple(range(num_gpus)))], QueueSettings(**settings), seen), seen


def submit(queue: Queue, time_s: float, *names: str, **more: object) -> list[Action]:
    demands = [demand_of(name, 10.0, 6.0, **more) for name in names]
    return queue.apply(*(Submitted(time_s=time_s, demand=demand) for demand in demands))


def started(actions: list[Action]) -> dict[str, str]:
    return {action.task: action.executor for action in actions if isinstance(action, StartTask)}


def test_tasks_that_come_together_share_and_the_plan_names_the_executor_that_is_started():
    queue, _ = queue_of()
    actions = submit(queue, 0, "a", "b", "c")
    assert started(actions) == {"a": "executor-1", "b": "executor-1", "c": "executor-1"}
    (planned,) = (action for action in actions if isinstance(action, Planned))
    assert {place.executor for place in planned.schedule.placements} == {"executor-1"}
    assert [queue.tasks[name].expected_end_s for name in "abc"] == pytest.approx([18.0] * 3)
    assert queue.tasks["a"].executor == "executor-1"


def test_a_task_joins_later_and_all_are_expected_as_the_model_says():
    queue, seen = queue_of()
    assert started(submit(queue, 0, "a")) == {"a": "executor-1"}
    assert started(submit(queue, 5, "b")) == {"b": "executor-1"}
    # a has 2 s of own work and 3 s of steps left
    assert queue.tasks["a"].expected_end_s == pytest.approx(5 + 2 * 2 + 3)
    assert queue.tasks["b"].expected_end_s == pytest.approx(5 + 2 * 2 + 3 + 2 + 3)
    queue.apply(Finished(time_s=12, task="a", attempt=1))
    assert queue.tasks["b"].expected_end_s == pytest.approx(17)
    submit(queue, 12, "c", base="other")
    assert seen.running["b"].remaining_s == pytest.approx(5)
    assert seen.running["b"].executor == "executor-1"
    assert queue.apply(Progressed(time_s=13, task="b", attempt=1, remaining_s=4.0)) == []
    assert queue.tasks["b"].expected_end_s == 17.0


def test_the_gpu_comes_free_with_the_last_task():
    queue, _ = queue_of()
    submit(queue, 0, "a", "b")
    assert started(submit(queue, 0, "x", base="other")) == {}
    assert started(queue.apply(Finished(time_s=10, task="a", attempt=1))) == {}
    assert started(queue.apply(Finished(time_s=12, task="b", attempt=1))) == {"x": "executor-2"}


def test_fifo_and_tasks_that_share_nothing_have_no_executor_to_join():
    queue, _ = queue_of(method="fifo")
    assert started(submit(queue, 0, "a", "b")) == {"a": ""}
    queue, _ = queue_of(2)
    alone = TaskDemand(task="x", num_gpus=1, duration_s=5.0)
    assert started(queue.apply(Submitted(time_s=0, demand=alone))) == {"x": ""}
    assert started(submit(queue, 0, "a")) == {"a": "executor-1"}


def test_very_long_queues_start_one_task_a_gpu_that_others_may_join():
    queue, _ = queue_of(max_planned=2)
    assert started(submit(queue, 0, "a", "b", "c")) == {"a": "executor-1"}
    queue, _ = queue_of(max_planned=0, list_method="fifo")
    assert started(submit(queue, 0, "a")) == {"a": ""}


def test_a_quota_counts_an_executor_once():
    queue, _ = queue_of(2, quotas={"t": 1})
    assert started(submit(queue, 0, "a", "b", tenant="t")) == {"a": "executor-1", "b": "executor-1"}
    assert started(submit(queue, 1, "c", tenant="t")) == {"c": "executor-1"}
    for name in "abc":
        queue.apply(Finished(time_s=20, task=name, attempt=1))
    assert started(submit(queue, 21, "d", tenant="t")) == {"d": "executor-2"}


def test_who_is_lost_beside_others_has_an_executor_of_its_own_from_then_on():
    queue, seen = queue_of(2, backoff_s=1.0)
    submit(queue, 0, *"abcd")
    crashed = [name for name, task in queue.tasks.items() if task.executor == "executor-1"]
    assert len(crashed) == 2
    for name in crashed:  # one after the other
        actions = queue.apply(Failed(time_s=3, task=name, attempt=1, reason="killed", is_retryable=True))
        assert not started(actions)
    assert started(submit(queue, 3, "e")) == {"e": "executor-3"}
    again = started(queue.apply(Woken(time_s=4)))
    for _ in range(4):
        running = [task for task in queue.tasks.values() if task.has_gpus and task.name not in crashed]
        again |= started(queue.apply(*(Finished(time_s=50, task=task.name, attempt=task.attempt) for task in running)))
    assert {name: again[name] for name in crashed} == dict.fromkeys(crashed, "")
    assert all(queue.tasks[name].num_failures == 1 for name in crashed)
    assert all(task.sharing is None for task in seen.problems[-1].pending if task.task in crashed)


def test_no_task_joins_an_executor_that_is_probably_lost():
    queue, _ = queue_of(backoff_s=1.0)
    submit(queue, 0, "a", "b")
    queue.apply(Failed(time_s=3, task="a", attempt=1, reason="killed", is_retryable=True))
    assert started(submit(queue, 3, "c")) == {}
    assert started(queue.apply(Failed(time_s=3, task="b", attempt=1, reason="killed", is_retryable=True))) == {
        "c": "executor-2"
    }


def test_an_executor_is_joined_after_one_of_its_tasks_was_stopped():
    queue, _ = queue_of()
    submit(queue, 0, "a", "b")
    queue.apply(Cancelled(time_s=1, task="a"))
    queue.apply(Failed(time_s=3, task="a", attempt=1, reason="stopped", is_retryable=True))
    assert started(submit(queue, 3, "c")) == {"c": "executor-1"}


def test_no_task_joins_an_executor_whose_gpu_was_lost_and_is_back():
    queue, _ = queue_of()
    submit(queue, 0, "a")
    queue.apply(GpuLost(time_s=1, gpu=G0))
    queue.apply(GpuAdded(time_s=2, gpu=G0))
    assert started(submit(queue, 3, "b")) == {}
    actions = queue.apply(Failed(time_s=4, task="a", attempt=1, reason="gone", is_retryable=True))
    assert started(actions) == {"a": "executor-2", "b": "executor-2"}


def test_who_is_lost_alone_shares_as_before():
    queue, _ = queue_of(backoff_s=1.0)
    submit(queue, 0, "a", "b")
    queue.apply(Finished(time_s=5, task="a", attempt=1))
    queue.apply(Failed(time_s=6, task="b", attempt=1, reason="killed", is_retryable=True, remaining_s=5.0))
    sharing = queue.tasks["b"].demand.sharing
    assert sharing is not None
    assert sharing.step_s == pytest.approx(3.0)
    assert started(queue.apply(Woken(time_s=7))) == {"b": "executor-2"}


def test_a_task_that_fails_by_its_own_fault_ends_alone():
    queue, _ = queue_of()
    submit(queue, 0, "a", "b")
    queue.apply(Failed(time_s=3, task="a", attempt=1, reason="bad row", is_retryable=False))
    assert queue.tasks["a"].state is TaskState.FAILED
    assert started(submit(queue, 4, "c")) == {"c": "executor-1"}
    assert queue.tasks["b"].state is TaskState.STARTING


@pytest.mark.parametrize("is_told_first", [True, False])
def test_a_lost_gpu_isolates_no_task(is_told_first: bool):
    queue, seen = queue_of(2, backoff_s=10.0)
    submit(queue, 0, *"abcd")
    there = [task.name for task in queue.tasks.values() if task.gpus == (G0,)]
    failed = [Failed(time_s=3, task=name, attempt=1, reason="gone", is_retryable=True) for name in there]
    if is_told_first:
        queue.apply(GpuLost(time_s=3, gpu=G0))
        assert {task.gpus for task in seen.problems[-1].running} <= {(Gpu("n", 1),)}
        for event in failed:
            queue.apply(event)
    else:
        queue.apply(*failed)
        queue.apply(GpuLost(time_s=4, gpu=G0))
    assert all(queue.tasks[name].isolated_by == 0 for name in there)
    assert all(queue.tasks[name].wanted.sharing is not None for name in there)


def test_a_task_that_is_stopped_leaves_its_executor_to_the_others():
    queue, seen = queue_of()
    submit(queue, 0, "a", "b")
    assert queue.apply(Cancelled(time_s=1, task="a")) == [StopTask(task="a")]
    assert started(submit(queue, 2, "c")) == {"c": "executor-1"}
    for name in "bc":
        queue.apply(Cancelled(time_s=3, task=name))
    assert started(submit(queue, 4, "d")) == {}, "none of its tasks continues, so none joins"
    assert all(task.sharing is None for task in seen.running.values())
    for name in "abc":
        actions = queue.apply(Failed(time_s=5, task=name, attempt=1, reason="stopped", is_retryable=True))
    assert started(actions) == {"d": "executor-2"}
    assert {queue.tasks[name].state for name in "abc"} == {TaskState.STOPPED}


def test_a_join_waits_for_the_next_plan_where_the_executor_has_ended():
    """Joins are planned for now; a later join may find no executor any more."""
    delay_s = {"b": 0.0}

    def solve(problem: SchedulingProblem, hint: object) -> Schedule:
        schedule = schedule_tasks(problem, method="lpt")
        placements = (replace(place, start_s=delay_s.get(place.task, 0.0)) for place in schedule.placements)
        return replace(schedule, placements=tuple(placements))

    queue = Queue([Node(name="n", gpus=(0,))], QueueSettings(), solve)
    submit(queue, 0, "a")
    delay_s["b"] = 5.0
    assert started(submit(queue, 1, "b")) == {}
    queue.apply(Cancelled(time_s=2, task="a"))
    assert started(queue.apply(Woken(time_s=6))) == {}
    delay_s["b"] = 0.0
    assert started(queue.apply(Finished(time_s=7, task="a", attempt=1))) == {"b": "executor-2"}


def test_a_new_estimate_of_a_task_keeps_the_share_of_its_steps():
    assert demand_of("a", 10.0, 6.0).lasting(20.0).sharing == demand_of("a", 20.0, 12.0).sharing


def test_a_group_that_is_to_start_later_starts_whole():
    queue, _ = queue_of()
    queue.apply(Submitted(time_s=0, demand=TaskDemand(task="first", num_gpus=1, duration_s=5.0)))
    assert started(submit(queue, 0, "a", "b")) == {}
    assert started(queue.apply(Woken(time_s=5))) == {}, "the one before takes longer"
    queue.apply(Started(time_s=6, task="first", attempt=1))
    begun = started(queue.apply(Finished(time_s=8, task="first", attempt=1)))
    assert set(begun) == {"a", "b"}
    assert len(set(begun.values())) == 1
