"""The controller, its queue on disk and its mailbox as one state machine, killed at any instant and started again.

Executors are only a clock, so nothing waits. The invariants: no task is lost or runs twice, every command takes effect
once, and a follower of the events that comes back sees each event once, in order.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from budgets import examples
from fake_cluster import Clock, leave_result
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tiny import make_task

import alto
from alto.cluster import (
    AttemptEnded,
    ClusterEvent,
    Controller,
    GpuAdded,
    GpuLost,
    Launch,
    LiveQueue,
    Outcome,
    QueueIntake,
)
from alto.engine.queue_setup import journal_begin
from alto.errors import QueueCommandError
from alto.records import Gpu, Node, TaskEstimate
from alto.runs import (
    CommandAnswer,
    JobAction,
    Journal,
    JournalEntry,
    Mailbox,
    QueueAction,
    QueueDir,
    QueueMailbox,
    RunDir,
    TaskStage,
    has_result,
    mailbox,
    queue_dir,
    read_events,
    read_queue_history,
    run_dir,
)
from alto.scheduler import schedule_tasks
from alto.scheduler.queue import Queue, QueueSettings, TaskState

NUM_GPUS = 3
SETTINGS = QueueSettings(backoff_s=0.5, max_backoff_s=2.0, max_attempts=1000)
MAX_TURNS = 2000


Fate: TypeAlias = "tuple[int, bool] | None"
"""The number of writes before the one that kills the process, and whether that one is torn; None lets it live."""

FATES = st.none() | st.tuples(st.integers(0, 4), st.booleans())


class KilledError(BaseException):
    """Raised at a write at which the process is killed."""


class World:
    """The state that outlives a controller: the clock, the disk, and the write that will kill the process."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.trained: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.cancelled: set[str] = set()
        self.writes_left: int | None = None
        self.tears = False

    def is_killed_now(self) -> bool:
        """Return whether the process dies at this write."""
        if self.writes_left is None:
            return False
        self.writes_left -= 1
        return self.writes_left < 0

    @contextmanager
    def another_process(self) -> Iterator[None]:
        """Let another process write, which the controller's fate does not affect."""
        left, self.writes_left = self.writes_left, None
        yield
        self.writes_left = left


class Executors:
    """A cluster whose executors train for some seconds of the clock, answer job commands, and die when told to."""

    has_gpus = True

    def __init__(self, world: World) -> None:
        self._world = world
        self._present = set(range(NUM_GPUS))
        self._kept = set(range(NUM_GPUS))
        self._dying: list[str] = []
        self._asked: set[str] = set()
        self.running: dict[str, tuple[float, Launch]] = {}

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (Node(name="n", gpus=tuple(sorted(self._present))),)

    def start(self, launch: Launch) -> None:
        run = RunDir(Path(launch.run_dir))
        assert launch.task not in self.running, "it is already running"
        assert {gpu.index for gpu in launch.gpus} <= self._present
        taken = {gpu for _, other in self.running.values() for gpu in other.gpus}
        assert taken.isdisjoint(launch.gpus)
        assert not has_result(run), "it has a result"
        assert launch.task not in self._world.cancelled, "it was cancelled"
        assert alto.load_task(run.task_file).name, "its folder is incomplete"
        self.running[launch.task] = (self._world.clock() + 3.0, launch)

    def stop(self, task: str) -> None:
        self._asked.add(task)

    def poll(self, timeout_s: float) -> list[ClusterEvent]:
        self._world.clock.now_s += timeout_s or 0.01
        events = [*self._deaths(), *self._changes_of_gpus()]
        for task, (ends_at, launch) in list(self.running.items()):
            self._answer(launch)
            if task in self._asked:
                events.append(self._end(launch, Outcome.INTERRUPTED))
            elif ends_at <= self._world.clock():
                self._world.trained[task] += 1
                leave_result(Path(launch.run_dir))
                events.append(self._end(launch, Outcome.FINISHED))
        return events

    def kill(self, task: str) -> None:
        """Kill an executor; as with everything, the next poll of the cluster finds it."""
        self._dying.append(task)

    def lose_gpu(self, index: int) -> None:
        self._kept.discard(index)

    def bring_gpus(self) -> None:
        self._kept = set(range(NUM_GPUS))

    def _deaths(self) -> Iterator[ClusterEvent]:
        while self._dying:
            if (task := self._dying.pop()) in self.running:
                yield self._end(self.running[task][1], Outcome.LOST)

    def _changes_of_gpus(self) -> Iterator[ClusterEvent]:
        """Report the lost GPUs, then the new ones, as a cluster does."""
        lost, came = self._present - self._kept, self._kept - self._present
        self._present = set(self._kept)
        for index in sorted(lost):
            gpu = Gpu("n", index)
            self._dying += [task for task, (_, launch) in self.running.items() if gpu in launch.gpus]
            yield from self._deaths()
            yield GpuLost(gpu=gpu)
        for index in sorted(came):
            yield GpuAdded(gpu=Gpu("n", index))

    def close(self) -> None:
        self.running.clear()

    def _end(self, launch: Launch, outcome: Outcome) -> AttemptEnded:
        del self.running[launch.task]
        self._asked.discard(launch.task)
        return AttemptEnded(task=launch.task, attempt=launch.attempt, outcome=outcome, reason=outcome.value)

    def _answer(self, launch: Launch) -> None:
        commands = Mailbox(RunDir(Path(launch.run_dir)))
        with self._world.another_process():
            for command in commands.pending():
                commands.answer(command.id, CommandAnswer(done=True, message="done"))
                self._world.answered[command.id] += 1


class ControlPlane(RuleBasedStateMachine):
    """Commands, deaths and restarts in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="alto-control-plane-"))
        self.world = World()
        self.patch = pytest.MonkeyPatch()
        self._let_writes_fail()
        self.task = make_task(self.folder, name="t")
        self.queue_dir = QueueDir.create(
            self.folder / "runs",
            [],
            [],
            {"method": "lpt", "strategy": "single", "cluster": "local", "total_gpus": None, "quotas": {}},
        )
        self.accepted: list[str] = []
        self.sent: dict[str, QueueAction] = {}
        self.job_commands: dict[str, str] = {}
        self.seen: list[JournalEntry] = []
        self.life: Iterator[None] | None = None

    @initialize()
    def begin(self) -> None:
        self.start()

    # -- process -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Resume the queue in a new process."""
        self.world.writes_left = None
        self.cluster = Executors(self.world)
        self.journal = Journal(self.queue_dir.run.journal_file)
        queue = Queue(self.cluster.nodes, SETTINGS, lambda problem, hint: schedule_tasks(problem, method="lpt"))
        self.controller = Controller(self.cluster, queue, self.journal, clock=self.world.clock)
        intake = QueueIntake(
            host="none:none",
            is_parallel=False,
            check=lambda task, nodes: None,
            estimate=lambda task: TaskEstimate(duration_s=3.0),
            base_of=lambda task: "",
        )
        self.live = LiveQueue(self.queue_dir, self.journal, intake)
        entries, _ = self.queue_dir.read()
        done = {entry.task for entry in entries if has_result(self.queue_dir.run_of(entry.task))}
        journal_begin(self.journal, self.cluster, "lpt", entries, done)
        self.live.begin(self.controller, done)

    def die(self) -> None:
        """End the process with its executors; the disk stays."""
        self.journal._file.close()
        self.start()

    @contextmanager
    def may_die(self, fate: Fate) -> Iterator[None]:
        """Let the process die within the block, if ``fate`` says so."""
        if fate is not None:
            self.world.writes_left, self.world.tears = fate
        try:
            yield
        except KilledError:
            self.die()
        self.world.writes_left = None

    @rule()
    def killed_between_two_turns(self) -> None:
        self.die()

    # -- commands --------------------------------------------------------------------------------------------------

    @rule(num_gpus=st.integers(1, 2), priority=st.integers(0, 2), tenant=st.sampled_from(["", "a", "b"]), fate=FATES)
    def submit(self, num_gpus: int, priority: int, tenant: str, fate: Fate) -> None:
        with self.may_die(fate):
            task = self.task.replace(num_gpus=num_gpus)
            self.accepted.append(self.live.submit(task, tenant=tenant, priority=priority))

    @rule(num_gpus=st.integers(1, 2))
    def submit_by_command(self, num_gpus: int) -> None:
        with self.world.another_process():
            values = self.task.replace(num_gpus=num_gpus).to_dict()
            self.sent[QueueMailbox(self.queue_dir.run).submit(values)] = QueueAction.SUBMIT

    @precondition(lambda self: self.accepted)
    @rule(data=st.data(), by_command=st.booleans(), fate=FATES)
    def cancel(self, data: st.DataObject, by_command: bool, fate: Fate) -> None:
        task = data.draw(st.sampled_from(self.accepted))
        if by_command:
            with self.world.another_process():
                self.sent[QueueMailbox(self.queue_dir.run).ask(QueueAction.CANCEL, task)] = QueueAction.CANCEL
            return
        self.cancel_task(task, fate)

    def cancel_task(self, task: str, fate: Fate) -> None:
        with self.may_die(fate):
            try:
                self.live.cancel(task)
                self.world.cancelled.add(task)
            except QueueCommandError:
                assert self.controller.status().tasks.get(task) is None or self.status(task).has_ended

    @precondition(lambda self: self.cluster.running)
    @rule(data=st.data())
    def job_command(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(sorted(self.cluster.running)))
        with self.world.another_process():
            answer = self.controller.job_command(task, JobAction.STOP, "job-000", timeout_s=0)
            assert answer is None, "nobody has had time to answer"
            for command in Mailbox(self.queue_dir.run_of(task)).pending():
                self.job_commands[command.id] = task

    # -- events --------------------------------------------------------------------------------------------------------

    @rule(turns=st.integers(1, 8), fate=FATES)
    def time_passes(self, turns: int, fate: Fate) -> None:
        with self.may_die(fate):
            for _ in range(turns):
                self.controller.turn()

    @precondition(lambda self: self.cluster.running)
    @rule(data=st.data())
    def an_executor_dies(self, data: st.DataObject) -> None:
        self.cluster.kill(data.draw(st.sampled_from(sorted(self.cluster.running))))

    @rule(index=st.integers(0, NUM_GPUS - 1))
    def a_gpu_is_lost(self, index: int) -> None:
        self.cluster.lose_gpu(index)

    @rule()
    def the_gpus_come_back(self) -> None:
        self.cluster.bring_gpus()

    @rule(count=st.integers(1, 10))
    def a_follower_reads_on_and_leaves(self, count: int) -> None:
        since = self.seen[-1].seq + 1 if self.seen else 0
        events = self.controller.events(since, follow=False)
        self.seen += [entry for entry, _ in zip(events, range(count), strict=False)]

    # -- invariants ----------------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        assert all(count == 1 for count in self.world.trained.values())

    @invariant()
    def what_a_follower_sees_is_in_order_and_each_once(self) -> None:
        assert [entry.seq for entry in self.seen] == list(range(len(self.seen)))

    def teardown(self) -> None:
        try:
            self._everything_ends_well()
        finally:
            self.journal._file.close()
            self.patch.undo()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _everything_ends_well(self) -> None:
        if not hasattr(self, "controller"):
            return
        self.world.writes_left = None
        self.cluster.bring_gpus()
        for _ in range(MAX_TURNS):
            self.controller.turn()
            if not self.controller.status().open_tasks:
                break
        entries, _ = self.queue_dir.read()
        names = [entry.task for entry in entries]
        assert set(self.accepted) <= set(names), "a task was lost"
        for entry in entries:
            is_wanted = not entry.is_cancelled
            assert self.world.trained[entry.task] == 1 or not is_wanted, f"{entry.task} was not trained"
            assert not (is_wanted and entry.task in self.world.cancelled)
        self._commands_took_effect_once(entries)
        self._journal_says_everything_once(names)

    def _commands_took_effect_once(self, entries: list[Any]) -> None:
        by_command = Counter(entry.command for entry in entries if entry.command)
        box = QueueMailbox(self.queue_dir.run)
        for command, action in self.sent.items():
            answer = box.wait_for_answer(command, 0)
            assert answer is not None, "a command was lost"
            if action is QueueAction.SUBMIT:
                assert answer.done
                assert by_command.pop(command) == 1
        assert not by_command
        for command, task in self.job_commands.items():
            assert self.world.answered[command] == (command not in self._unanswered(task))

    def _unanswered(self, task: str) -> set[str]:
        """Return the commands to a task that was cancelled before an executor could read them."""
        pending = {command.id for command in Mailbox(self.queue_dir.run_of(task)).pending()}
        assert not pending or self.world.trained[task] == 0
        return pending

    def _journal_says_everything_once(self, names: list[str]) -> None:
        lines = read_events(self.queue_dir.run.journal_file)
        submitted = [line["task"] for line in lines if line["event"] == "task_submitted"]
        cancelled = [line["task"] for line in lines if line["event"] == "task_cancelled"]
        assert submitted == names
        assert len(set(cancelled)) == len(cancelled)
        while (rest := list(self.controller.events(len(self.seen), follow=False))) and len(self.seen) < len(lines):
            self.seen += rest
        assert [entry.to_dict() for entry in self.seen] == lines
        history = read_queue_history(self.queue_dir.root)
        for name, task in history.tasks.items():
            expected = TaskStage.FINISHED if self.world.trained[name] else TaskStage.CANCELLED
            assert task.state is expected

    # -- helpers ---------------------------------------------------------------------------------------------------

    def status(self, task: str) -> Any:
        found = self.controller.status().tasks[task]
        assert found.state is not TaskState.FAILED
        return found

    def _let_writes_fail(self) -> None:
        def fatal(write: Callable[..., Any]) -> Callable[..., Any]:
            def written(*arguments: Any) -> Any:
                if self.world.is_killed_now():
                    if not self.world.tears:
                        write(*arguments)  # the write succeeds, and then the process dies
                    raise KilledError
                return write(*arguments)

            return written

        for module in (queue_dir, mailbox, run_dir):
            self.patch.setattr(module, "replace_file", fatal(module.replace_file))
        append = Journal._write

        def torn(journal: Journal, data: bytes) -> None:
            is_queue = journal.path == self.queue_dir.run.journal_file
            if is_queue and self.world.is_killed_now():
                append(journal, data[: len(data) // 2] if self.world.tears else data)
                raise KilledError
            append(journal, data)

        self.patch.setattr(Journal, "_write", torn)


ControlPlane.TestCase.settings = settings(
    max_examples=examples(60),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestControlPlane = ControlPlane.TestCase


def test_killed_at_every_write_of_every_command() -> None:
    """The same state machine on one path that kills the process at each write of each command."""
    plane = ControlPlane()
    plane.begin()
    for writes in range(5):
        for tears in (False, True):
            plane.submit(1, 0, "", (writes, tears))
            plane.submit_by_command(1)
            for task in plane.accepted[-1:]:
                plane.cancel_task(task, (writes, tears))
            for _ in range(2):
                plane.time_passes(2, (writes, tears))
    plane.submit(3, 0, "", None)
    plane.cancel_task(plane.accepted[-1], None)
    plane.time_passes(8, None)
    plane.killed_between_two_turns()
    assert plane.accepted[-1] in plane.world.cancelled
    plane.teardown()
