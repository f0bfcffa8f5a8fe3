"""The environment of a simulated queue: a clock, executors whose tasks advance, and failures."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from alto.records import Gpu, Node, Placement
from alto.scheduler.inter_task import Member, alone_rates, finish_times_s, member_of
from alto.scheduler.queue import (
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
    Started,
    StartTask,
    Submitted,
    Woken,
)
from alto.scheduler.simulate.workload import SimulatedTask
from alto.spec import Simulation

_TOLD_AT = 0.5
"""Share of an attempt after which its executor reports an estimate of the remaining time."""


@dataclass(slots=True, kw_only=True)
class Work:
    """The true state of a task.

    Attributes:
        left_s: Seconds of work that remained at the start of the latest attempt, when run alone.
        done_s: Seconds of `left_s` that the latest attempt had done when its executor last changed.
        has_reported: Whether the latest attempt has reported its remaining time.
    """

    task: SimulatedTask
    left_s: float
    rng: random.Random
    attempt: int = 0
    gpus: tuple[Gpu, ...] = ()
    started_s: float = 0.0
    done_s: float = 0.0
    has_reported: bool = False

    @property
    def remaining_s(self) -> float:
        """Remaining seconds of work, when run alone."""
        return max(self.left_s - self.done_s, 0.0)

    @property
    def member(self) -> Member:
        """The remaining work, for the model of time."""
        return member_of(self.remaining_s, self.task.task.step_share * self.remaining_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A forecast for one task, valid while no task joins or leaves its executor.

    Attributes:
        end_s: When the task ends or is lost, by the virtual clock.
        is_lost: Whether the task is then lost together with its executor.
        reported_s: When the task reports its remaining time; None if it does not.
    """

    work: Work
    end_s: float
    is_lost: bool = False
    reported_s: float | None = None
    remaining_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedExecutor:
    """One executor; its tasks advance by the model of time in :mod:`alto.scheduler.inter_task.colocation`.

    Attributes:
        name: Name in the queue; empty if no other task may join.
        crash_s: When the executor is lost if it still runs, by the virtual clock.
        version: Number of joins and leaves so far; a forecast made at an earlier version is void.
    """

    name: str
    crash_s: float
    works: list[Work] = field(default_factory=list)
    version: int = 0
    _since_s: float = 0.0

    def join(self, work: Work, now_s: float) -> None:
        self._advance(now_s)
        work.started_s, work.done_s, work.has_reported = now_s, 0.0, False
        self.works.append(work)

    def leave(self, work: Work, now_s: float) -> None:
        self._advance(now_s)
        self.works.remove(work)

    def forecasts(self) -> Iterator[Forecast]:
        """Yield the forecast for each of its tasks, counted from the last change."""
        members = [work.member for work in self.works]
        ends_s, rates = finish_times_s(members), alone_rates(members)
        for work, last_s, rate in zip(self.works, ends_s, rates, strict=True):
            end_s = self._since_s + work.remaining_s / rate
            if self.crash_s < end_s:
                yield Forecast(work=work, end_s=self.crash_s, is_lost=True)
                continue
            half_s = (1 - _TOLD_AT) * work.left_s
            reported_s = max(end_s - half_s / rate, self._since_s)
            remaining_s = half_s if len(members) == 1 else max(self._since_s + last_s - reported_s, 0.0)
            yield Forecast(
                work=work, end_s=end_s, reported_s=None if work.has_reported else reported_s, remaining_s=remaining_s
            )

    def _advance(self, now_s: float) -> None:
        for work, rate in zip(self.works, alone_rates([work.member for work in self.works]), strict=True):
            work.done_s += (now_s - self._since_s) * rate
        self._since_s = now_s
        self.version += 1


_MIN_GPU_CHANGES = 1000
_CHANGES_PER_GPU = 20
"""Limit of lost and returned GPUs while no task runs or pauses: above it, waiting tasks are given up.

By then each GPU was lost ten times, and there were never as many GPUs as a task needs.
"""


class World:
    """Drives ``queue`` until every task has finished or was given up.

    A task is given up when the queue gives it up, or when GPUs have come and gone many times without being enough for
    it.

    Attributes:
        planned: Placement of every task in the first plan that includes it.
        attempts: Actual placement of every attempt.
        planners: Methods that made the plans.
    """

    def __init__(self, simulation: Simulation, queue: Queue, nodes: Sequence[Node], *, early_exit: bool) -> None:
        self._simulation = simulation
        self._queue = queue
        self._early_exit = early_exit
        self._works: dict[str, Work] = {}
        self._executors: dict[str, SimulatedExecutor] = {}  # by task
        self._open: set[str] = set()
        self._num_running = 0
        self._num_gpu_changes = 0
        self._order = itertools.count()
        self._to_come: list[tuple[float, int, QueueInput, SimulatedExecutor | None, int]] = []
        self._gpu_rngs = {
            gpu: random.Random(f"{gpu.node} {gpu.index} {simulation.seed}")
            for node in nodes
            for gpu in (Gpu(node.name, index) for index in node.gpus)
        }
        self.planned: dict[str, Placement] = {}
        self.attempts: list[Placement] = []
        self._lost_at: dict[Gpu, float] = {}
        self._absences: list[tuple[float, float]] = []
        self.num_replans = 0
        self.planners: set[str] = set()
        self.now_s = 0.0

    def run(self, tasks: Sequence[SimulatedTask], observe: Callable[[int], None]) -> None:
        """Run until all ``tasks`` have ended, and call ``observe`` with the number of ended tasks after every event."""
        shares = self._simulation.early_exit_shares if self._early_exit else (1.0,)
        expected_share = sum(shares) / len(shares)
        for task in tasks:
            true_s = task.task.duration_s * (task.exit_share if self._early_exit else 1.0)
            rng = random.Random(f"{task.name} {self._simulation.seed}")
            self._works[task.name] = Work(task=task, left_s=true_s, rng=rng)
            demand = task.demand(expected_share)
            self._at(task.task.arrival_s, Submitted(time_s=task.task.arrival_s, demand=demand))
        for gpu in self._gpu_rngs:
            self._schedule_loss(gpu, 0.0)
        self._open = set(self._works)
        while self._open:
            self._step()
            observe(len(tasks) - len(self._open))

    def gpu_s(self, since_s: float) -> float:
        """Return the GPU seconds since ``since_s``, without the time when a GPU was lost."""
        absences = [*self._absences, *((lost_s, self.now_s) for lost_s in self._lost_at.values())]
        lost_s = sum(max(0.0, end_s - max(start_s, since_s)) for start_s, end_s in absences)
        return len(self._gpu_rngs) * max(0.0, self.now_s - since_s) - lost_s

    def _step(self) -> None:
        """Advance the clock to the next event."""
        wake_s = self._queue.next_wake_s
        if wake_s is not None and (not self._to_come or wake_s < self._to_come[0][0]):
            self._at(wake_s, Woken(time_s=wake_s))
        self.now_s = self._to_come[0][0]
        events: list[QueueInput] = []
        while self._to_come and self._to_come[0][0] <= self.now_s:
            *_, event, executor, version = heapq.heappop(self._to_come)
            if executor is None or executor.version == version:
                events += self._apply_event(event)
        self._apply(events)
        is_only_gpus = all(isinstance(event, GpuLost | GpuAdded) for event in events)
        if not is_only_gpus or wake_s is not None or self._num_running:
            self._num_gpu_changes = 0
        else:
            self._num_gpu_changes += len(events)
            if self._num_gpu_changes > max(_MIN_GPU_CHANGES, _CHANGES_PER_GPU * len(self._gpu_rngs)):
                waiting = self._open & self._queue.tasks.keys()
                self._apply([Cancelled(time_s=self.now_s, task=name) for name in sorted(waiting)])

    def _apply(self, events: Sequence[QueueInput]) -> None:
        touched = {event.task for event in events if isinstance(event, Finished | Failed | Cancelled)}
        for action in self._queue.apply(*events) if events else ():
            if isinstance(action, Planned):
                self.num_replans += 1
                self.planners.add(action.schedule.method)
                for placement in action.schedule.placements:
                    if placement.task not in self.planned:
                        self.planned[placement.task] = replace(placement, start_s=self.now_s + placement.start_s)
            elif isinstance(action, StartTask):
                self._begin(action)
            elif isinstance(action, GaveUp):
                touched.add(action.task)  # given up at its last failure, or at the end of the pause after it
        self._open -= {name for name in touched if self._queue.tasks[name].has_ended}

    def _at(self, time_s: float, event: QueueInput, executor: SimulatedExecutor | None = None) -> None:
        """Schedule ``event`` for ``time_s``; if ``executor`` is given, only if no task joins or leaves it before."""
        version = executor.version if executor is not None else 0
        heapq.heappush(self._to_come, (time_s, next(self._order), event, executor, version))

    def _begin(self, start: StartTask) -> None:
        work = self._works[start.task]
        work.attempt, work.gpus = start.attempt, start.gpus
        self._num_running += 1
        executor = self._running(start.executor)
        if executor is None:
            rate = self._simulation.crashes_per_hour / 3600
            crash_s = self.now_s + work.rng.expovariate(rate) if rate else float("inf")
            executor = SimulatedExecutor(name=start.executor, crash_s=crash_s)
        executor.join(work, self.now_s)
        self._executors[start.task] = executor
        self._at(self.now_s, Started(time_s=self.now_s, task=start.task, attempt=start.attempt))
        self._schedule_events(executor)

    def _running(self, name: str) -> SimulatedExecutor | None:
        if not name:
            return None
        return next((found for found in self._executors.values() if found.name == name), None)

    def _schedule_events(self, executor: SimulatedExecutor) -> None:
        """Schedule the events of the tasks of ``executor``, valid while it does not change."""
        for forecast in executor.forecasts():
            name, attempt, end_s = forecast.work.task.name, forecast.work.attempt, forecast.end_s
            if forecast.reported_s is not None:
                progress = Progressed(
                    time_s=forecast.reported_s, task=name, attempt=attempt, remaining_s=forecast.remaining_s
                )
                self._at(forecast.reported_s, progress, executor)
            end: QueueInput = Finished(time_s=end_s, task=name, attempt=attempt)
            if forecast.is_lost:
                end = Failed(time_s=end_s, task=name, attempt=attempt, reason="crashed", is_retryable=True)
            self._at(end_s, end, executor)

    def _apply_event(self, event: QueueInput) -> list[QueueInput]:
        """Apply ``event`` to the simulated cluster and return the resulting events for the queue."""
        match event:
            case Finished(task=task) | Failed(task=task) | Progressed(task=task) | Started(task=task):
                work = self._works[task]
                # An attempt that was lost with its GPU sends no more events.
                if work.attempt != event.attempt or not work.gpus:
                    return []
                work.has_reported = work.has_reported or isinstance(event, Progressed)
                if isinstance(event, Failed):
                    return [self._fail(work, event.reason)]
                if isinstance(event, Finished):
                    self._end_attempt(work)
            case GpuLost(gpu=gpu):
                self._lost_at[gpu] = self.now_s
                repair_s = self._simulation.gpu_repair_hours * 3600
                self._at(self.now_s + repair_s, GpuAdded(time_s=self.now_s + repair_s, gpu=gpu))
                hit = [work for work in self._works.values() if gpu in work.gpus]
                return [event, *(self._fail(work, f"GPU {gpu.index} of {gpu.node} was lost") for work in hit)]
            case GpuAdded(gpu=gpu):
                self._absences.append((self._lost_at.pop(gpu), self.now_s))
                self._schedule_loss(gpu, self.now_s)
        return [event]

    def _schedule_loss(self, gpu: Gpu, now_s: float) -> None:
        hours = self._simulation.gpu_mtbf_hours
        if hours is not None:
            at_s = now_s + self._gpu_rngs[gpu].expovariate(1 / (hours * 3600))
            self._at(at_s, GpuLost(time_s=at_s, gpu=gpu))

    def _fail(self, work: Work, reason: str) -> Failed:
        """End an attempt, and drop the work done since its last checkpoint."""
        self._end_attempt(work)
        interval_s = self._simulation.checkpoint_interval_s
        saved_s = work.done_s - (work.done_s % interval_s if interval_s else 0.0)
        work.left_s = max(0.0, work.left_s - saved_s)
        return Failed(
            time_s=self.now_s,
            task=work.task.name,
            attempt=work.attempt,
            reason=reason,
            is_retryable=True,
            remaining_s=work.left_s,
        )

    def _end_attempt(self, work: Work) -> None:
        name = work.task.name
        executor = self._executors.pop(name)
        self.attempts.append(
            Placement(
                task=name,
                gpus=work.gpus,
                start_s=work.started_s,
                duration_s=self.now_s - work.started_s,
                executor=executor.name,
            )
        )
        executor.leave(work, self.now_s)
        if executor.works:
            self._schedule_events(executor)
        work.gpus = ()
        self._num_running -= 1
