"""A task that has more GPUs than it has use for goes on with fewer, where others wait and all gain."""

from __future__ import annotations

import pytest

from alto.records import Gpu, Node
from alto.scheduler import TaskDemand, schedule_tasks
from alto.scheduler.queue import (
    Failed,
    Finished,
    GpuLost,
    Offered,
    Queue,
    QueueSettings,
    Started,
    StartTask,
    Stopped,
    StopTask,
    Submitted,
    TaskState,
)
from alto.scheduler.queue.events import Action, GaveUp


def submit(queue: Queue, time_s: float, name: str, num_gpus: int) -> list[Action]:
    demand = TaskDemand(task=name, num_gpus=num_gpus, duration_s=100.0)
    return queue.apply(Submitted(time_s=time_s, demand=demand))


def wide_and_waiting(*, waiting: bool = True) -> Queue:
    """A task on all four GPUs, and another behind it."""
    queue = Queue(
        [Node(name="n", gpus=(0, 1, 2, 3))],
        QueueSettings(),
        lambda problem, hint: schedule_tasks(problem, method="fifo", hint=hint),
    )
    submit(queue, 0, "wide", 4)
    queue.apply(Started(time_s=1, task="wide", attempt=1))
    if waiting:
        submit(queue, 2, "next", 3)
    return queue


def offer(queue: Queue, *, duration_s: float = 50.0, kept_duration_s: float = 40.0) -> list[Action]:
    return queue.apply(
        Offered(
            time_s=10,
            task="wide",
            attempt=1,
            num_gpus=1,
            duration_s=duration_s,
            kept_duration_s=kept_duration_s,
        )
    )


def ended(queue: Queue, *, is_retryable: bool = True) -> list[Action]:
    return queue.apply(
        Failed(time_s=12, task="wide", attempt=1, reason="stopped", is_retryable=is_retryable, remaining_s=45)
    )


def test_it_ends_and_goes_on_beside_the_one_that_waited():
    queue = wide_and_waiting()
    assert offer(queue) == [StopTask(task="wide")]
    assert queue.tasks["wide"].state is TaskState.SHRINKING
    actions = ended(queue)
    assert sorted(action.task for action in actions if isinstance(action, StartTask)) == ["next", "wide"]
    wide = queue.tasks["wide"]
    assert (len(wide.gpus), wide.attempt, wide.num_failures) == (1, 2, 0)
    assert wide.demand.duration_s == 50.0


def test_nothing_is_given_back_where_nobody_waits_until_somebody_does():
    queue = wide_and_waiting(waiting=False)
    assert offer(queue) == []
    assert StopTask(task="wide") in submit(queue, 11, "next", 3)


@pytest.mark.parametrize(("duration_s", "takes"), [(159.0, True), (161.0, False)])
def test_what_counts_is_the_time_of_gpus(duration_s: float, takes: bool):
    # 40 s on four GPUs against so many on one.
    assert bool(offer(wide_and_waiting(), duration_s=duration_s)) == takes


def test_who_finishes_first_has_finished():
    queue = wide_and_waiting()
    offer(queue)
    queue.apply(Finished(time_s=11, task="wide", attempt=1))
    assert queue.tasks["wide"].state is TaskState.FINISHED


def test_who_is_stopped_meanwhile_is_stopped():
    queue = wide_and_waiting()
    offer(queue)
    assert queue.apply(Stopped(time_s=11, task="wide")) == []
    ended(queue)
    assert queue.tasks["wide"].state is TaskState.STOPPED


def test_a_failure_for_good_stays_one():
    queue = wide_and_waiting()
    offer(queue)
    assert any(isinstance(action, GaveUp) for action in ended(queue, is_retryable=False))


def test_a_lost_gpu_is_told_as_such():
    queue = wide_and_waiting()
    offer(queue)
    queue.apply(GpuLost(time_s=11, gpu=Gpu("n", 3)))
    ended(queue)
    assert queue.tasks["wide"].demand.num_gpus == 4
    assert queue.tasks["wide"].waits_for


def test_the_next_attempt_makes_its_own_offers():
    queue = wide_and_waiting()
    offer(queue)
    ended(queue)
    assert queue.tasks["wide"].offer is None
