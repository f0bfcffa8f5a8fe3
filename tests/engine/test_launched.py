"""Restarts of an executor of several ranks, and its errors and files when it ends for good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from journals import event
from profiles import measured_at_once
from tiny import make_task, save_model

import alto
from alto.cluster import AttemptEnded, ClusterEvent, Launch, Outcome, TaskTicket
from alto.cluster.host import HostedRun
from alto.engine.launched import MAX_ATTEMPTS, EventRelay
from alto.engine.runner import portable
from alto.engine.work import PLAN, Planning, Training
from alto.errors import (
    DeviceMemoryError,
    NoResultError,
    RunBusyError,
    RunError,
    TargetModuleError,
    TaskInterruptedError,
)
from alto.executor.recovery import oom_record_event, write_oom_record
from alto.records import Node
from alto.runs import Journal, JournalEntry, JournalTail, RunDir, read_entries
from alto.runs.events import MeasuringBegun, TaskRelayed

Attempt = Callable[[RunDir], AttemptEnded]


class ScriptedCluster:
    """Executors that end at once according to ``attempts``; the last one repeats."""

    has_gpus = False

    def __init__(self, attempts: Sequence[Attempt]) -> None:
        self.nodes = (Node(name="local", gpus=(0, 1)),)
        self.launches: list[Launch] = []
        self._attempts = list(attempts)
        self._num_ended = 0

    def start(self, launch: Launch) -> None:
        self.launches.append(launch)

    def stop(self, task: str) -> None:
        pass

    def poll(self, timeout_s: float) -> list[ClusterEvent]:
        if len(self.launches) == self._num_ended:
            return []
        self._num_ended += 1
        number = min(len(self.launches), len(self._attempts)) - 1
        ended = self._attempts[number](RunDir(Path(self.launches[-1].run_dir)))
        return [replace(ended, attempt=self.launches[-1].attempt)]

    def close(self) -> None:
        pass


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ScriptedCluster]:
    """``script(*attempts)`` sets what the ranks of tasks do."""

    def use(*attempts: Attempt) -> ScriptedCluster:
        cluster = ScriptedCluster(attempts)
        monkeypatch.setattr("alto.engine.launched.open_cluster", lambda *_, **__: cluster)
        return cluster

    return use


def ends(outcome: Outcome, reason: str = "rank 1 was killed", error: str = "") -> Attempt:
    return lambda run: AttemptEnded(task="tiny", attempt=1, outcome=outcome, reason=reason, error=error)


def saves(run: RunDir) -> AttemptEnded:
    """Write another checkpoint, and get lost."""
    with Journal(run.journal_file, past=read_entries(run.journal_file)) as journal:
        journal.append(event("task_resumed"))
        journal.append(event("checkpoint", jobs={}))
    return lost(run)


def refuses(max_tokens: int) -> Attempt:
    """Run out of memory, and report the passes that would fit."""

    def attempt(run: RunDir) -> AttemptEnded:
        event = {"phase": "step", "residents": [], "num_tokens": 99, "max_tokens_per_pass": max_tokens}
        write_oom_record(run, oom_record_event(event))
        return ends(Outcome.LOST, "no memory", "DeviceMemoryError")(run)

    return attempt


lost = ends(Outcome.LOST)
stopped = ends(Outcome.INTERRUPTED, "stopped on request before it began", "KeyboardInterrupt")
failed = ends(Outcome.FAILED, "target_modules: no q_porj", "TargetModuleError")


@pytest.mark.parametrize(
    ("attempts", "num_launches"),
    [
        ([lost], MAX_ATTEMPTS),
        ([lost, saves, lost], 2 + MAX_ATTEMPTS),
        ([saves, saves, saves, saves, lost], 4 + MAX_ATTEMPTS),
        ([refuses(64), refuses(32), refuses(16), refuses(8), lost], 4 + MAX_ATTEMPTS),
        ([refuses(64), refuses(64)], 1 + MAX_ATTEMPTS),
    ],
)
def test_attempts_go_on_while_they_come_further(
    script: Callable[..., ScriptedCluster], tmp_path: Path, attempts: list[Attempt], num_launches: int
) -> None:
    cluster = script(*attempts)
    with pytest.raises((RunError, MemoryError)):
        alto.Engine(output_dir=tmp_path / "runs").tune(make_task(tmp_path, num_gpus=2))
    assert len(cluster.launches) == num_launches
    assert [launch.attempt for launch in cluster.launches] == list(range(1, num_launches + 1))
    assert {launch.num_ranks for launch in cluster.launches} == {2}


def test_a_run_whose_ranks_are_lost_is_kept_with_its_logs(
    script: Callable[..., ScriptedCluster], tmp_path: Path
) -> None:
    script(lost)
    with pytest.raises(RunError, match=r"rank 1 was killed, 3 times without progress; .*alto resume"):
        alto.Engine(output_dir=tmp_path / "runs").tune(make_task(tmp_path, num_gpus=2))
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_the_error_of_a_run_without_retries_names_no_number_of_attempts(
    script: Callable[..., ScriptedCluster], tmp_path: Path
) -> None:
    script(ends(Outcome.FAILED, "it could not write down how it ended"))
    with pytest.raises(RunError, match=r"how it ended; fix the cause"):
        alto.Engine(output_dir=tmp_path / "runs").tune(make_task(tmp_path, num_gpus=2))


def test_what_is_wrong_with_the_task_is_raised_once_and_leaves_nothing(
    script: Callable[..., ScriptedCluster], tmp_path: Path
) -> None:
    cluster = script(failed)
    with pytest.raises(TargetModuleError, match="no q_porj"):
        alto.Engine(output_dir=tmp_path / "runs").tune(make_task(tmp_path, num_gpus=2))
    assert len(cluster.launches) == 1
    assert not (tmp_path / "runs").exists()


def test_a_run_that_had_begun_is_kept_whatever_ends_it(script: Callable[..., ScriptedCluster], tmp_path: Path) -> None:
    script(saves, ends(Outcome.FAILED, "all diverged", "NoResultError"))
    with pytest.raises(NoResultError):
        alto.Engine(output_dir=tmp_path / "runs").tune(make_task(tmp_path, num_gpus=2))
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.parametrize("attempt", [lost, stopped])
def test_who_is_asked_to_stop_is_not_started_again(
    script: Callable[..., ScriptedCluster], tmp_path: Path, attempt: Attempt
) -> None:
    cluster = script(attempt)
    engine = alto.Engine(output_dir=tmp_path / "runs", is_interrupted=lambda: True)
    with pytest.raises(TaskInterruptedError, match="continue with: alto resume"):
        engine.tune(make_task(tmp_path, num_gpus=2))
    (root,) = (tmp_path / "runs").iterdir()
    with pytest.raises(TaskInterruptedError):
        engine.resume(root)
    assert len(cluster.launches) == 2


def test_a_run_that_is_worked_on_is_left_alone(script: Callable[..., ScriptedCluster], tmp_path: Path) -> None:
    cluster = script(lost)
    run = RunDir.create(tmp_path / "runs", make_task(tmp_path, num_gpus=2))
    with run.locked(), pytest.raises(RunBusyError):
        alto.Engine(output_dir=tmp_path / "runs").resume(run.root)
    assert cluster.launches == []


def test_a_process_that_measures_says_so_in_the_journal_of_its_run_until_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALTO_CACHE", str(tmp_path / "cache"))
    measured_at_once(monkeypatch)
    run = RunDir(tmp_path / "run")
    run.begin(portable(make_task(tmp_path, model=str(save_model(tmp_path / "model")))))
    shown: list[JournalEntry] = []
    relay, tail = EventRelay(run, [shown.append]), JournalTail(run.journal_file)
    ticket = TaskTicket(task="tiny", run_dir=str(run.root), host=PLAN)
    hosted = HostedRun(number=1, ticket=ticket, is_interrupted=lambda: False)
    Planning().attach(hosted)
    for each in tail.read():
        relay.observe(JournalEntry(seq=0, time=0.0, event=TaskRelayed(task="tiny", entry=each)))
    (begun,) = (each.event for each in shown)
    assert isinstance(begun, MeasuringBegun)
    assert begun.remaining_s is not None
    assert begun.kept_in == str(tmp_path / "cache")
    training = Training()
    training.attach(hosted)
    assert not any(isinstance(each.event, MeasuringBegun) for each in read_entries(run.journal_file))
    assert [each.seq for each in tail.read()][:1] == [0]
    while not training.turn():
        pass


def test_a_process_that_is_lost_while_it_measures_leaves_no_run(
    script: Callable[..., ScriptedCluster], tmp_path: Path
) -> None:
    def measures(run: RunDir) -> AttemptEnded:
        with Journal(run.journal_file) as journal:
            journal.append(MeasuringBegun(task="tiny", model="tiny"))
        return ends(Outcome.FAILED, "too large", "DeviceMemoryError")(run)

    script(measures)
    with pytest.raises(DeviceMemoryError):
        alto.Engine(output_dir=tmp_path / "runs").tune(make_task(tmp_path, num_gpus=2))
    assert not (tmp_path / "runs").exists()
