"""The queue: events in, actions out."""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from alto.errors import SpecError
from alto.records import Gpu, Node, Placement, Schedule
from alto.scheduler.inter_task import SchedulingProblem, TaskDemand
from alto.scheduler.queue.events import (
    Action,
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
    QueueInput,
    Started,
    StartTask,
    StopTask,
    Submitted,
    Woken,
)
from alto.scheduler.queue.executors import Executors, GpuPool
from alto.scheduler.queue.task import LEAST_S, MAX_ATTEMPTS_IN_ALL, QueueSettings, ScheduledTask, TaskState
from alto.scheduler.queue.waiting import Waiting, schedule_of_now

Solve = Callable[[SchedulingProblem, Schedule | None], Schedule]
"""Makes a schedule of the waiting tasks. Its hint is the unstarted rest of the previous plan, on the same clock. A task
that the schedule does not place waits for the next plan."""


class Queue:
    """Decides which task starts when and where, while tasks and GPUs come and go and estimates change.

    A plan is made when a task is submitted, ends or fails, when GPUs are added or lost, and when an estimate changes by
    more than a set share. Running tasks stay where they are. A task starts when its planned start time has come and its
    GPUs are free. It never takes GPUs that the plan holds for an earlier task, and never exceeds its tenant's quota. A
    running task that offers to continue on fewer GPUs is restarted on them if other tasks wait and GPU seconds are
    saved.

    Tasks that may share start in executors that other tasks can join; see :class:`Executors`. A task planned to join an
    executor starts at once, or waits for the next plan if that executor has ended. A task that was lost while it shared
    an executor gets its own executor from then on.

    The queue has no clock and no side effects: events carry their time, and its driver carries out the actions.
    """

    def __init__(self, nodes: Sequence[Node], settings: QueueSettings, solve: Solve) -> None:
        self._settings = settings
        self._solve = solve
        self._pool = GpuPool(nodes, settings.declared)
        self._now_s = 0.0
        self._tasks: dict[str, ScheduledTask] = {}
        self._waiting = Waiting(settings.list_method)
        self._executors = Executors(self._pool, settings.quotas)
        self._to_come: list[tuple[float, int, ScheduledTask]] = []  # heap of tasks that may not start yet
        self._plan: Schedule | None = None  # the latest one, on the queue's clock
        self._next: list[Placement] = []  # unstarted placements of the plan, on the queue's clock

    @property
    def tasks(self) -> Mapping[str, ScheduledTask]:
        """All tasks ever submitted, in the order of submission."""
        return MappingProxyType(self._tasks)

    @property
    def declared_nodes(self) -> tuple[Node, ...]:
        """The largest machines that the cluster has had; a task that does not fit on them is refused."""
        return self._pool.declared_nodes

    @property
    def next_wake_s(self) -> float | None:
        """When `Woken` is due if no other event comes before; None if only other events can change anything."""
        while self._to_come and (self._to_come[0][0] <= self._now_s or not _waits_until(*self._to_come[0])):
            heapq.heappop(self._to_come)
        wakes = [self._to_come[0][0]] if self._to_come else []
        planned = (
            found for found in self._next if found.start_s > self._now_s and self._executors.are_free(found.gpus)
        )
        wakes += [placement.start_s for placement in planned][:1]
        return min(wakes, default=None)

    def apply(self, *events: QueueInput) -> list[Action]:
        """Handle events and return the actions to carry out. The events of one call lead to one plan.

        Late events are ignored: events of an old attempt or of a task that has ended, a priority of a task that no
        longer waits (`Prioritised`), and an estimate of a task that no longer runs (`Progressed`).
        A task that is being stopped counts as stopped once its executor has failed; if it finishes first, it is
        finished.

        Raises:
            SpecError: A new task's name is taken, or it does not fit on :attr:`declared_nodes` or into its tenant's
                quota. Also raised if a task is unknown to the queue, or an estimate is not a duration. Then no event
                is handled.
        """
        self.check(*events)
        self._now_s = max([self._now_s, *(event.time_s for event in events)])
        lost = {event.gpu for event in events if isinstance(event, GpuLost)}
        for task in self._executors.tasks.values() if lost else ():
            task.has_lost_gpu = task.has_lost_gpu or not lost.isdisjoint(task.gpus)
        actions: list[Action] = []
        nodes = self._pool.nodes
        reasons = [reason for event in events if (reason := self._take_in(event, actions))]
        if self._pool.nodes != nodes:
            self._note_missing_gpus(*self._waiting)
        reasons += self._handle_due_tasks(actions)
        self._take_offers(actions)
        if reasons and self._waiting:
            actions += self._replan("; ".join(reasons))
        return actions + self._start_due()

    # Events.

    def check(self, *events: QueueInput) -> None:
        """Check that :meth:`apply` would accept ``events``; raise the same errors."""
        known = set()
        for event in events:
            match event:
                case Submitted(demand=demand):
                    if demand.task in self._tasks or demand.task in known:
                        raise SpecError(
                            f"task: expected a name that is new to the queue, found {demand.task!r} again; rename it"
                        )
                    self._check_fits(demand)
                    known.add(demand.task)
                case GpuLost() | GpuAdded() | Woken():
                    pass
                case _ if event.task not in self._tasks and event.task not in known:
                    raise SpecError(
                        f"task: expected the name of a submitted task, found {event.task!r}; submit the task first, or "
                        "correct its name"
                    )
                case Progressed(remaining_s=estimate_s) | Offered(duration_s=estimate_s):
                    _check_estimate(event.task, estimate_s)
                case Failed(remaining_s=estimate_s) if estimate_s is not None:
                    _check_estimate(event.task, estimate_s)

    def _check_fits(self, demand: TaskDemand) -> None:
        """Check that a task fits on the machines that the cluster has had, even if some are lost now."""
        declared = self._pool.declared_nodes
        SchedulingProblem(nodes=declared, pending=(demand,), quotas=self._settings.quotas)  # checks the task
        _, most = _sizes(declared)
        if demand.is_on_one_node and demand.num_gpus > most:
            raise SpecError(
                f"task {demand.task!r}: expected num_gpus from 1 to {most} (the GPUs of the largest machine), found "
                f"{demand.num_gpus}; ask for fewer, or add a larger machine"
            )

    def _take_in(self, event: QueueInput, actions: list[Action]) -> str:
        """Handle ``event`` and return why it needs a new plan; empty if it does not."""
        match event:
            case Submitted():
                return self._submit(event)
            case GpuLost(gpu=gpu):
                if not self._pool.lose(gpu):
                    return ""
                self._cancel_failures(gpu)
                return f"GPU {gpu.index} of {gpu.node} was lost"
            case GpuAdded(gpu=gpu):
                return f"GPU {gpu.index} of {gpu.node} was added" if self._pool.add(gpu) else ""
            case Woken():
                return ""
        task = self._tasks[event.task]
        match event:
            case Cancelled():
                return self._stop(task, actions)
            case Prioritised(priority=priority) if task.state is TaskState.WAITING:
                self._waiting.remove(task)
                task.demand = replace(task.demand, priority=priority)
                self._waiting.add(task)
                return f"{task.name} now has priority {priority}"
            case Prioritised():
                return ""
        if not task.has_gpus or event.attempt != task.attempt:
            return ""
        match event:
            case Started():
                task.state = TaskState.RUNNING if task.state is TaskState.STARTING else task.state
                return ""
            case Progressed(remaining_s=remaining_s):
                task.expected_end_s = self._now_s + remaining_s
                return self._moved(task, task.expected_end_s - task.started_s)
            case Offered():
                task.offer = event
                return ""
            case Finished():
                self._executors.leave(task, self._now_s)
                self._end(task, TaskState.FINISHED)
                return f"{task.name} finished"
            case Failed():
                return self._fail(task, event, actions)

    def _submit(self, event: Submitted) -> str:
        demand = event.demand
        task = ScheduledTask(
            number=len(self._tasks),
            demand=replace(demand, release_s=0.0) if demand.release_s else demand,
            submitted_s=self._now_s,
            ready_s=demand.release_s,
            planned_s=demand.duration_s,
        )
        self._tasks[task.name] = task
        self._wait(task)
        return f"{task.name} submitted"

    def _stop(self, task: ScheduledTask, actions: list[Action]) -> str:
        if task.state is TaskState.WAITING:
            self._waiting.remove(task)
            self._end(task, TaskState.STOPPED)
            return f"{task.name} was stopped"
        if task.state in (TaskState.STARTING, TaskState.RUNNING):
            actions.append(StopTask(task=task.name))
        if task.has_gpus:
            task.state = TaskState.STOPPING
        return ""

    def _take_offers(self, actions: list[Action]) -> None:
        """Stop running tasks that save GPU seconds on fewer GPUs, if other tasks wait."""
        for task in self._executors.tasks.values() if self._waiting else ():
            offer = task.offer
            if task.state is not TaskState.RUNNING or offer is None or offer.num_gpus >= len(task.gpus):
                continue
            # Compare GPU seconds, not seconds of the task, because other tasks wait for the GPUs.
            if offer.num_gpus * offer.duration_s < len(task.gpus) * offer.kept_duration_s:
                task.state = TaskState.SHRINKING
                actions.append(StopTask(task=task.name))

    def _shrink(self, task: ScheduledTask, offer: Offered) -> str:
        task.demand = replace(task.demand.lasting(max(offer.duration_s, LEAST_S)), num_gpus=offer.num_gpus)
        task.planned_s, task.ready_s = task.demand.duration_s, self._now_s
        task.state = TaskState.WAITING
        self._wait(task)
        return f"{task.name} continues with {offer.num_gpus} of its {len(task.gpus)} GPUs"

    def _fail(self, task: ScheduledTask, event: Failed, actions: list[Action]) -> str:
        was_stopping, is_shrinking = task.state is TaskState.STOPPING, task.state is TaskState.SHRINKING
        # A task that is being stopped also ends with `Failed`; if its executor was lost, the other tasks in it report.
        is_lost = event.is_retryable and not (was_stopping or is_shrinking or task.has_lost_gpu)
        if self._executors.leave(task, self._now_s, is_lost=is_lost) and is_lost:
            task.isolated_by = task.attempt
        task.reason = event.reason
        if was_stopping:
            self._end(task, TaskState.STOPPED)
            return f"{task.name} was stopped"
        if is_shrinking and task.offer is not None and event.is_retryable and not task.has_lost_gpu:
            return self._shrink(task, task.offer)
        task.num_failures = 0 if event.has_progressed else task.num_failures + (not task.has_lost_gpu)
        verdict = self._verdict(task, event)
        if verdict:
            return self._give_up(task, verdict, actions)
        if event.remaining_s is not None:
            task.demand = task.demand.lasting(max(event.remaining_s, LEAST_S))
        task.planned_s = task.demand.duration_s
        # A lost GPU is not the task's fault, so it needs no pause.
        task.ready_s = self._now_s + (0.0 if task.has_lost_gpu else self._settings.pause_s(task.num_failures))
        if self._is_spent(task) and task.ready_s <= self._now_s:
            return self._give_up_spent(task, actions)
        task.state = TaskState.WAITING
        self._wait(task)
        return f"{task.name} {'lost a GPU' if task.has_lost_gpu else 'failed'}"

    def _verdict(self, task: ScheduledTask, event: Failed) -> str:
        """Return why the task is not tried again; empty if it is. An executor whose GPU is lost cannot report the
        loss."""
        if not event.is_retryable and not task.has_lost_gpu:
            return f"{event.reason} (another attempt would fail in the same way)"
        if not event.has_progressed and task.attempt >= MAX_ATTEMPTS_IN_ALL * self._settings.max_attempts:
            return f"{event.reason} (attempt {task.attempt}, counting attempts whose GPUs were lost)"
        return ""

    def _is_spent(self, task: ScheduledTask) -> bool:
        """Return whether the task has used up its attempts; it is given up after its pause, unless a lost GPU explains
        a failure."""
        return task.num_failures >= self._settings.max_attempts

    def _give_up_spent(self, task: ScheduledTask, actions: list[Action]) -> str:
        verdict = f"{task.reason} (attempt {task.num_failures} of {self._settings.max_attempts})"
        return self._give_up(task, verdict, actions)

    def _give_up(self, task: ScheduledTask, verdict: str, actions: list[Action]) -> str:
        task.reason = verdict
        self._end(task, TaskState.FAILED)
        actions.append(GaveUp(task=task.name, reason=verdict))
        return f"{task.name} was given up"

    def _cancel_failures(self, gpu: Gpu) -> None:
        """Cancel the last failure and the pause of waiting tasks that failed on ``gpu``, which is now reported as lost.

        These tasks may start at once, and may share an executor again.
        """
        for task in self._waiting:
            if gpu in task.gpus and task.ready_s >= self._now_s and not task.has_lost_gpu:
                task.has_lost_gpu = True
                task.num_failures = max(0, task.num_failures - 1)
                task.ready_s = self._now_s
                task.isolated_by = 0 if task.isolated_by == task.attempt else task.isolated_by

    def _moved(self, task: ScheduledTask, estimate_s: float) -> str:
        if abs(estimate_s - task.planned_s) <= self._settings.estimate_change * task.planned_s:
            return ""
        before, task.planned_s = task.planned_s, max(estimate_s, LEAST_S)
        return f"{task.name} is now estimated to take {estimate_s:.4g} s, not {before:.4g} s"

    # Waiting and ended tasks.

    def _wait(self, task: ScheduledTask) -> None:
        self._waiting.add(task)
        self._note_missing_gpus(task)
        if task.ready_s > self._now_s:
            heapq.heappush(self._to_come, (task.ready_s, task.number, task))

    def _end(self, task: ScheduledTask, state: TaskState) -> None:
        task.state = state
        task.ended_s = self._now_s

    def _handle_due_tasks(self, actions: list[Action]) -> list[str]:
        """Handle tasks whose pause or release time is over."""
        reasons = []
        while self._to_come and self._to_come[0][0] <= self._now_s:
            wake = heapq.heappop(self._to_come)
            if not _waits_until(*wake):
                continue
            task = wake[2]
            if self._is_spent(task):
                self._waiting.remove(task)
                reasons.append(self._give_up_spent(task, actions))
            else:
                reasons.append(f"{task.name} may start")
        return reasons

    # The plan.

    def _replan(self, reason: str) -> list[Action]:
        left = self._unstarted_plan()
        self._plan, self._next = None, []
        schedule = self._plan_whole(left) if self._is_planned_whole() else self._plan_now()
        if schedule is None:
            return []
        schedule = self._executors.named(schedule)
        self._plan = _shifted(schedule, self._now_s)
        self._next = sorted(self._plan.placements, key=lambda placement: placement.start_s)
        return [Planned(reason=reason, schedule=schedule)]

    def _is_planned_whole(self) -> bool:
        most = self._settings.max_planned
        return most is None or len(self._waiting) + len(self._executors.tasks) <= most or self._waiting.has_priorities

    def _plan_whole(self, left: Schedule | None) -> Schedule | None:
        now = self._now_s
        pending = tuple(
            task.wanted if task.ready_s <= now else replace(task.wanted, release_s=task.ready_s - now)
            for task in self._waiting
            if not task.waits_for and not self._is_spent(task)
        )
        if not pending:
            return None
        problem = SchedulingProblem(
            nodes=self._pool.nodes,
            pending=pending,
            running=self._executors.running(now),
            quotas=self._settings.quotas,
        )
        return self._solve(problem, left)

    def _plan_now(self) -> Schedule | None:
        if not self._pool.free:
            return None
        return schedule_of_now(
            self._waiting,
            method=self._settings.list_method,
            nodes=self._pool.nodes,
            free=self._pool.free_nodes,
            quotas=self._settings.quotas,
            in_use=self._executors.in_use,
            now_s=self._now_s,
        )

    def _note_missing_gpus(self, *tasks: ScheduledTask) -> None:
        num_gpus, most = _sizes(self._pool.nodes)
        for task in tasks:
            wanted = task.demand.num_gpus
            task.waits_for = ""
            if wanted > num_gpus:
                task.waits_for = f"{wanted} GPUs; the cluster has {num_gpus}"
            elif task.demand.is_on_one_node and wanted > most:
                task.waits_for = f"{wanted} GPUs on one machine; the largest has {most}"

    def _unstarted_plan(self) -> Schedule | None:
        """Return the unstarted part of the plan, with times counted from now."""
        if self._plan is None:
            return None
        waiting = [found for found in self._next if self._tasks[found.task].state is TaskState.WAITING]
        left = _shifted(replace(self._plan, placements=tuple(waiting)), -self._now_s)
        return replace(left, placements=tuple(replace(p, start_s=max(0.0, p.start_s)) for p in left.placements))

    def _start_due(self) -> list[Action]:
        started: list[Action] = []
        held: set[Gpu] = set()
        blocked: list[Placement] = []
        num_due = bisect.bisect_right(self._next, self._now_s, key=lambda placement: placement.start_s)
        for placement in self._next[:num_due]:
            task = self._tasks[placement.task]
            if task.state is not TaskState.WAITING:
                continue
            is_free = held.isdisjoint(placement.gpus) or self._executors.is_there(placement)
            if is_free and self._executors.may_start(task, placement):
                started.append(self._start(task, placement))
            else:
                held.update(placement.gpus)
                blocked.append(placement)
        if num_due > len(blocked):
            self._next[:num_due] = blocked
        return started

    def _start(self, task: ScheduledTask, placement: Placement) -> StartTask:
        self._waiting.remove(task)
        is_open = self._plan is not None and self._plan.method != "fifo"
        self._executors.start(task, placement, self._now_s, is_open=is_open)
        return StartTask(task=task.name, gpus=placement.gpus, attempt=task.attempt, executor=task.executor)


def _sizes(nodes: Sequence[Node]) -> tuple[int, int]:
    """Return the number of GPUs of all nodes, and of the largest."""
    sizes = [len(node.gpus) for node in nodes]
    return sum(sizes), max(sizes, default=0)


def _waits_until(ready_s: float, _: int, task: ScheduledTask) -> bool:
    return task.state is TaskState.WAITING and task.ready_s == ready_s


def _shifted(schedule: Schedule, by_s: float) -> Schedule:
    placements = tuple(replace(found, start_s=found.start_s + by_s) for found in schedule.placements)
    return replace(schedule, placements=placements, bound_s=schedule.bound_s + by_s)


def _check_estimate(task: str, estimate_s: float) -> None:
    if not (math.isfinite(estimate_s) and estimate_s >= 0):
        raise SpecError(f"task {task!r}: expected an estimate of 0 or more seconds, found {estimate_s}; correct it")
