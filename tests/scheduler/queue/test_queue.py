"""The queue: what it starts, plans, retries, refuses and ignores, and the GPUs it offers to tasks that can use more."""

from __future__ import annotations

from functools import partial

import pytest

from alto.errors import SpecError
from alto.records import Gpu, Node
from alto.scheduler import TaskDemand, schedule_tasks
from alto.scheduler.queue import (
    Cancelled,
    Failed,
    Finished,
    GaveUp,
    GpuAdded,
    GpuLost,
    Offered,
    Planned,
    Prioritised,
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


def queue_of(num_gpus: int = 2, **settings: object) -> Queue:
    nodes = [Node(name="n", gpus=tuple(range(num_gpus)))]
    return Queue(nodes, QueueSettings(**settings), lambda problem, _: partial(schedule_tasks, method="fifo")(problem))


def submit(
    queue: Queue, time_s: float, *names: str, gpus: int = 1, duration_s: float = 100, **more: object
) -> list[Action]:
    demands = [TaskDemand(task=name, num_gpus=gpus, duration_s=duration_s, **more) for name in names]
    return queue.apply(*(Submitted(time_s=time_s, demand=demand) for demand in demands))


def started(actions: list[Action]) -> list[str]:
    return [action.task for action in actions if isinstance(action, StartTask)]


def test_a_task_starts_when_gpus_come_free_earlier_than_planned():
    queue = queue_of(1)
    assert started(submit(queue, 0, "a", "b")) == ["a"]
    actions = queue.apply(Finished(time_s=10, task="a", attempt=1))
    assert started(actions) == ["b"]
    assert [action.reason for action in actions if isinstance(action, Planned)] == ["a finished"]


def test_events_of_one_moment_lead_to_one_plan():
    actions = submit(queue_of(2), 0, "a", "b")
    assert [action.reason for action in actions if isinstance(action, Planned)] == ["a submitted; b submitted"]


def test_failures_are_retried_after_growing_pauses_and_given_up_at_the_cap():
    queue = queue_of(1, max_attempts=3, backoff_s=10)
    submit(queue, 0, "a")
    for attempt, pause_s in ((1, 10), (2, 20)):
        now_s = 100.0 * attempt
        failed = queue.apply(Failed(time_s=now_s, task="a", attempt=attempt, reason="boom", is_retryable=True))
        assert started(failed) == []
        assert queue.next_wake_s == now_s + pause_s
        assert started(queue.apply(Woken(time_s=now_s + pause_s))) == ["a"]
    assert queue.apply(Failed(time_s=400, task="a", attempt=3, reason="boom", is_retryable=True)) == []
    assert queue.next_wake_s == 440
    actions = queue.apply(Woken(time_s=440))
    assert actions == [GaveUp(task="a", reason="boom (attempt 3 of 3)")]
    assert queue.tasks["a"].state is TaskState.FAILED


def test_a_failure_that_would_come_again_is_given_up_at_once():
    queue = queue_of(1)
    submit(queue, 0, "a")
    actions = queue.apply(Failed(time_s=1, task="a", attempt=1, reason="no data", is_retryable=False))
    assert isinstance(actions[0], GaveUp)


@pytest.mark.parametrize("is_lost_first", [True, False])
def test_a_lost_gpu_does_not_count_against_the_task_until_there_is_no_end_to_it(is_lost_first: bool):
    queue = queue_of(1, max_attempts=1)
    submit(queue, 0, "a")
    for attempt in range(1, 11):
        events = [
            GpuLost(time_s=attempt, gpu=Gpu("n", 0)),
            Failed(time_s=attempt, task="a", attempt=attempt, reason="gone", is_retryable=True),
        ]
        actions = queue.apply(*(events if is_lost_first else events[::-1]))
        if attempt < 10:
            assert queue.tasks["a"].state is TaskState.WAITING
            assert started(queue.apply(GpuAdded(time_s=attempt, gpu=Gpu("n", 0)))) == ["a"]
    assert any(isinstance(action, GaveUp) for action in actions)


def test_a_failure_is_not_counted_where_its_gpu_is_heard_to_be_lost_in_the_pause_after_it():
    queue = queue_of(2, max_attempts=1, backoff_s=10)
    submit(queue, 0, "a")
    queue.apply(Failed(time_s=1, task="a", attempt=1, reason="gone", is_retryable=True))
    (planned, start) = queue.apply(GpuLost(time_s=5, gpu=Gpu("n", 0)))
    assert planned.reason == "GPU 0 of n was lost"
    assert (start.gpus, start.attempt) == ((Gpu("n", 1),), 2)
    assert queue.tasks["a"].num_failures == 0
    queue.apply(Failed(time_s=20, task="a", attempt=2, reason="boom", is_retryable=True))
    (given_up,) = queue.apply(Woken(time_s=30))
    assert given_up == GaveUp(task="a", reason="boom (attempt 1 of 1)")


def test_a_gpu_lost_after_the_pause_excuses_no_failure():
    queue = queue_of(2, max_attempts=2, backoff_s=10)
    submit(queue, 0, "a")
    queue.apply(Failed(time_s=1, task="a", attempt=1, reason="boom", is_retryable=True))
    assert started(queue.apply(Woken(time_s=11))) == ["a"]
    queue.apply(GpuLost(time_s=12, gpu=Gpu("n", 1)))
    assert queue.tasks["a"].num_failures == 1


def test_who_is_about_to_be_given_up_holds_no_gpus_and_can_be_stopped():
    queue = queue_of(1, max_attempts=1, backoff_s=10)
    submit(queue, 0, "a", "b")
    failed = queue.apply(Failed(time_s=1, task="a", attempt=1, reason="boom", is_retryable=True))
    assert started(failed) == ["b"]
    (planned,) = (action for action in failed if isinstance(action, Planned))
    assert [placement.task for placement in planned.schedule.placements] == ["b"]
    queue.apply(Cancelled(time_s=2, task="a"))
    assert queue.apply(Woken(time_s=11)) == []
    assert queue.tasks["a"].state is TaskState.STOPPED


def test_a_gpu_that_comes_back_is_not_free_before_its_task_is_heard_of():
    queue = queue_of(1)
    submit(queue, 0, "a", "b")
    queue.apply(GpuLost(time_s=1, gpu=Gpu("n", 0)))
    assert started(queue.apply(GpuAdded(time_s=2, gpu=Gpu("n", 0)))) == []
    failed = Failed(time_s=3, task="a", attempt=1, reason="gone", is_retryable=True)
    assert started(queue.apply(failed)) == ["a"]


def test_what_is_too_large_after_a_loss_waits_with_a_reason_and_is_planned_when_gpus_come():
    queue = queue_of(2)
    queue.apply(GpuLost(time_s=0, gpu=Gpu("n", 1)))
    assert started(submit(queue, 1, "wide", gpus=2)) == []
    assert queue.tasks["wide"].waits_for == "2 GPUs; the cluster has 1"
    assert started(queue.apply(GpuAdded(time_s=2, gpu=Gpu("n", 1)))) == ["wide"]
    assert queue.tasks["wide"].waits_for == ""


def test_ranks_wait_for_a_machine_that_has_room_for_all_of_them():
    large, small = Node(name="large", gpus=(0, 1, 2, 3)), Node(name="small", gpus=(0, 1))
    queue = Queue([large, small], QueueSettings(), lambda problem, _: schedule_tasks(problem, method="fifo"))
    queue.apply(*(GpuLost(time_s=0, gpu=Gpu("large", index)) for index in large.gpus))
    queue.apply(*(GpuAdded(time_s=1, gpu=Gpu(name, index)) for name in ("c", "d") for index in (0, 1)))
    assert started(submit(queue, 2, "ranks", gpus=4, is_on_one_node=True)) == []
    assert queue.tasks["ranks"].waits_for == "4 GPUs on one machine; the largest has 2"
    assert started(submit(queue, 3, "narrow", gpus=2, is_on_one_node=True)) == ["narrow"]
    # A machine that comes back has another name; the number of GPUs stays the same here.
    events = [GpuLost(time_s=4, gpu=Gpu(name, index)) for name in ("c", "d") for index in (0, 1)]
    events += [GpuAdded(time_s=4, gpu=Gpu("large again", index)) for index in range(4)]
    (start,) = (action for action in queue.apply(*events) if isinstance(action, StartTask))
    assert start.gpus == tuple(Gpu("large again", index) for index in range(4))


def test_machines_that_the_cluster_had_count_once_and_the_largest_of_all_times():
    queue = queue_of(2, declared=(Node(name="before", gpus=(0, 1, 2)),))
    for turn in range(3):  # each time, the machine comes back under another name
        queue.apply(*(GpuAdded(time_s=turn, gpu=Gpu(f"other-{turn}", index)) for index in (0, 1)))
        queue.apply(*(GpuLost(time_s=turn, gpu=Gpu(f"other-{turn}", index)) for index in (0, 1)))
    assert [len(node.gpus) for node in queue.declared_nodes] == [3, 2]
    submit(queue, 5, "a", gpus=5)
    submit(queue, 6, "b", gpus=3, is_on_one_node=True)
    with pytest.raises(SpecError, match="expected num_gpus from 1 to 5"):
        submit(queue, 7, "c", gpus=6)
    with pytest.raises(SpecError, match=r"expected num_gpus from 1 to 3 \(the GPUs of the largest machine\), found 4"):
        submit(queue, 8, "d", gpus=4, is_on_one_node=True)


def test_what_no_cluster_or_quota_allows_is_refused_and_nothing_is_taken_in():
    queue = queue_of(2, quotas={"t": 1})
    with pytest.raises(SpecError, match="expected num_gpus from 1 to 2"):
        submit(queue, 0, "huge", gpus=3)
    with pytest.raises(SpecError, match="quota of tenant 't'"):
        submit(queue, 0, "greedy", gpus=2, tenant="t")
    with pytest.raises(SpecError, match="new to the queue, found 'twice'"):
        submit(queue, 0, "twice", "twice")
    with pytest.raises(SpecError, match="expected the name of a submitted task, found 'nobody'"):
        queue.apply(Cancelled(time_s=0, task="nobody"))
    assert not queue.tasks


def test_an_overrun_does_not_break_the_quota():
    queue = queue_of(2, quotas={"t": 1})
    assert started(submit(queue, 0, "a", "b", tenant="t", duration_s=10)) == ["a"]
    assert queue.apply(Woken(time_s=10)) == []  # b's start has come and its GPU is free, but a still runs
    assert started(queue.apply(Finished(time_s=12, task="a", attempt=1))) == ["b"]


def test_a_task_beyond_its_estimate_is_planned_to_take_a_tenth_of_its_time_more():
    queue = queue_of(1)
    submit(queue, 0, "a", duration_s=100)
    (planned,) = submit(queue, 200, "b")
    assert isinstance(planned, Planned)
    assert [(one.task, one.start_s) for one in planned.schedule.placements] == [("b", pytest.approx(20))]


def test_an_overrun_takes_no_gpus_that_the_plan_holds():
    queue = queue_of(2)
    submit(queue, 0, "a", "b", duration_s=10)
    submit(queue, 0, "wide", gpus=2, duration_s=10)
    submit(queue, 0, "last", duration_s=10)
    assert started(queue.apply(Finished(time_s=5, task="a", attempt=1))) == []
    assert queue.apply(Woken(time_s=20)) == []  # last's start has come and its GPU is free, but held for wide
    assert started(queue.apply(Finished(time_s=21, task="b", attempt=1))) == ["wide"]


def test_a_moved_estimate_leads_to_a_plan_and_a_small_move_does_not():
    queue = queue_of(1, estimate_change=0.25)
    submit(queue, 0, "a", "b")
    assert queue.apply(Progressed(time_s=10, task="a", attempt=1, remaining_s=100)) == []
    (planned,) = queue.apply(Progressed(time_s=20, task="a", attempt=1, remaining_s=200))
    assert isinstance(planned, Planned)
    assert planned.reason == "a is now estimated to take 220 s, not 100 s"
    assert planned.schedule.placements[0].start_s == 200
    assert queue._plan is not None
    assert queue._plan.placements[0].start_s == 220


def test_priorities_that_change_lead_to_one_plan_of_the_tasks_that_wait():
    queue = queue_of(1)
    submit(queue, 0, "a", "b", "c")
    changes = [Prioritised(time_s=1, task=task, priority=level) for task, level in (("a", -5), ("b", -1))]
    planned = [action for action in queue.apply(*changes) if isinstance(action, Planned)]
    assert [action.reason for action in planned] == ["b now has priority -1"], "a is already running"
    assert queue.tasks["a"].demand.priority == 0
    assert started(queue.apply(Finished(time_s=2, task="a", attempt=1))) == ["c"]
    assert started(queue.apply(Finished(time_s=3, task="c", attempt=1))) == ["b"]


def test_late_events_change_nothing():
    queue = queue_of(1)
    submit(queue, 0, "a")
    queue.apply(Failed(time_s=1, task="a", attempt=1, reason="hung", is_retryable=True))
    queue.apply(Woken(time_s=11))
    assert queue.tasks["a"].attempt == 2
    assert queue.apply(Finished(time_s=12, task="a", attempt=1)) == []
    assert queue.tasks["a"].has_gpus
    queue.apply(Finished(time_s=13, task="a", attempt=2))
    assert (
        queue.apply(Progressed(time_s=14, task="a", attempt=2, remaining_s=1e6), Cancelled(time_s=14, task="a")) == []
    )
    assert queue.tasks["a"].state is TaskState.FINISHED


def test_a_task_that_is_stopped_keeps_its_gpus_until_its_executor_has_ended():
    queue = queue_of(1)
    submit(queue, 0, "a", "b", "c")
    assert queue.apply(Cancelled(time_s=1, task="a")) == [StopTask(task="a")]
    assert started(queue.apply(Cancelled(time_s=2, task="b"))) == []
    ended = queue.apply(Failed(time_s=3, task="a", attempt=1, reason="interrupted", is_retryable=True))
    assert started(ended) == ["c"]
    assert {queue.tasks[name].state for name in "ab"} == {TaskState.STOPPED}


def test_a_task_waits_for_its_release():
    queue = queue_of(1)
    assert started(submit(queue, 5, "a", release_s=20)) == []
    assert queue.next_wake_s == 20
    assert started(queue.apply(Woken(time_s=20))) == ["a"]


def submit_wide(queue: Queue, time_s: float, name: str, num_gpus: int) -> list[Action]:
    demand = TaskDemand(task=name, num_gpus=num_gpus, duration_s=100.0)
    return queue.apply(Submitted(time_s=time_s, demand=demand))


def wide_and_waiting(*, waiting: bool = True) -> Queue:
    """Return a queue of a task on all four GPUs, and another that waits."""
    queue = Queue(
        [Node(name="n", gpus=(0, 1, 2, 3))],
        QueueSettings(),
        lambda problem, hint: schedule_tasks(problem, method="fifo", hint=hint),
    )
    submit_wide(queue, 0, "wide", 4)
    queue.apply(Started(time_s=1, task="wide", attempt=1))
    if waiting:
        submit_wide(queue, 2, "next", 3)
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


def test_nothing_is_given_back_until_a_task_waits():
    queue = wide_and_waiting(waiting=False)
    assert offer(queue) == []
    assert StopTask(task="wide") in submit_wide(queue, 11, "next", 3)


@pytest.mark.parametrize(("duration_s", "takes"), [(159.0, True), (161.0, False)])
def test_what_counts_is_the_time_of_gpus(duration_s: float, takes: bool):
    # 40 s on four GPUs against this duration on one.
    assert bool(offer(wide_and_waiting(), duration_s=duration_s)) == takes


def test_who_finishes_first_has_finished():
    queue = wide_and_waiting()
    offer(queue)
    queue.apply(Finished(time_s=11, task="wide", attempt=1))
    assert queue.tasks["wide"].state is TaskState.FINISHED


def test_who_is_stopped_meanwhile_is_stopped():
    queue = wide_and_waiting()
    offer(queue)
    assert queue.apply(Cancelled(time_s=11, task="wide")) == []
    ended(queue)
    assert queue.tasks["wide"].state is TaskState.STOPPED


def test_a_failure_for_good_stays_one():
    queue = wide_and_waiting()
    offer(queue)
    assert any(isinstance(action, GaveUp) for action in ended(queue, is_retryable=False))


def test_a_lost_gpu_is_reported_as_such():
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
