"""The contract that every kind of cluster fulfils for the queue."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from clusters import Started, is_alive, wait_for
from fake_cluster import Clock

from alto.cluster import AttemptEnded, EntryWritten, Outcome, executor_process

StartCluster = Callable[..., Started]

NEVER_S = 3600.0
"""A timeout longer than these tests wait: an executor that has it ends for another reason, or not at all."""

here = pytest.mark.parametrize("start_cluster", ["local"], indirect=True)
"""Tests of one executor on its machine, where Ray's actor calls the same code, and of what test_ray.py covers."""


def test_an_executor_tells_its_journal_and_then_that_it_finished(start_cluster: StartCluster) -> None:
    started = start_cluster("works")
    started.start()
    ended = started.until_ended()
    assert (ended.outcome, ended.reason) == (Outcome.FINISHED, "")
    assert [line["event"] for line in started.lines_of()] == ["began", "done"]
    assert isinstance(started.events[-1], AttemptEnded)
    assert started.cluster.poll(0) == []


@here
@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        ("SpecError", Outcome.FAILED),
        ("DataFormatError", Outcome.FAILED),
        ("ModelNotFoundError", Outcome.FAILED),
        ("NoResultError", Outcome.FAILED),
        ("UnsupportedError", Outcome.FAILED),
        ("RunBusyError", Outcome.LOST),
        ("RunWriteError", Outcome.LOST),
        ("DeviceMemoryError", Outcome.LOST),
        ("anything else", Outcome.LOST),
        ("TaskInterruptedError", Outcome.INTERRUPTED),
    ],
)
def test_what_an_error_means_for_the_next_attempt(start_cluster: StartCluster, error: str, outcome: Outcome) -> None:
    started = start_cluster("fails")
    (started.run_dir("a") / "error").write_text(error, encoding="utf-8")
    started.start()
    ended = started.until_ended()
    assert ended.outcome is outcome
    assert "as the test wants it" in ended.reason


def test_who_is_asked_to_stop_saves_and_ends(start_cluster: StartCluster) -> None:
    started = start_cluster("waits")
    started.start()
    pid = started.until_event("began")["pid"]
    started.cluster.stop("a")
    ended = started.until_ended()
    assert (ended.outcome, ended.reason) == (Outcome.INTERRUPTED, "stopped on request, with everything on disk")
    assert [line["event"] for line in started.lines_of()] == ["began", "checkpoint"]
    assert not is_alive(pid)


def test_who_is_asked_to_stop_at_once_does(start_cluster: StartCluster) -> None:
    started = start_cluster("loads")
    started.start()
    started.cluster.stop("a")
    assert started.until_ended().outcome is Outcome.INTERRUPTED


@here
def test_who_is_asked_to_stop_while_it_loads_does_not_go_on_loading(start_cluster: StartCluster) -> None:
    started = start_cluster("loads")
    started.start()
    started.until_event("loading")
    started.cluster.stop("a")
    assert started.until_ended().outcome is Outcome.INTERRUPTED


@here
def test_who_does_not_heed_is_killed(start_cluster: StartCluster) -> None:
    started = start_cluster("hangs", drain_timeout_s=0.5)
    started.start()
    pid = started.until_event("loading")["pid"]
    started.cluster.stop("a")
    ended = started.until_ended()
    assert ended.outcome is Outcome.LOST
    assert "was asked to stop and had not ended" in ended.reason
    assert not is_alive(pid)


def test_a_killed_executor_is_found(start_cluster: StartCluster) -> None:
    started = start_cluster("waits")
    started.start()
    pid = started.until_event("began")["pid"]
    os.kill(pid, signal.SIGKILL)
    ended = started.until_ended()
    assert ended.outcome is Outcome.LOST
    assert "SIGKILL" in ended.reason


@here
def test_an_executor_that_ends_without_a_word_is_lost(start_cluster: StartCluster) -> None:
    started = start_cluster("exits")
    started.start()
    ended = started.until_ended()
    assert ended.outcome is Outcome.LOST
    assert "7" in ended.reason


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock for watching this machine's executors; it stands still until a test moves it."""
    clock = Clock()
    monkeypatch.setattr(executor_process, "time", SimpleNamespace(monotonic=clock))
    return clock


def until_ended_by(clock: Clock, started: Started) -> AttemptEnded:
    """Advance the clock by at most a third of the heartbeat timeout per poll until the executor has ended."""

    def wait() -> None:
        clock.now_s += NEVER_S / 3
        started.events += started.cluster.poll(0.02)

    return wait_for(started.ended, "the end", meanwhile=wait)


@here
@pytest.mark.parametrize(("host", "tells", "is_stopped"), [("hangs", "loading", False), ("waits", "began", True)])
def test_a_hung_loop_and_a_stopped_process_are_found_though_they_live(
    start_cluster: StartCluster, clock: Clock, host: str, tells: str, is_stopped: bool
) -> None:
    started = start_cluster(host, heartbeat_timeout_s=NEVER_S)
    started.start()
    pid = started.until_event(tells)["pid"]
    if is_stopped:
        os.kill(pid, signal.SIGSTOP)
    ended = until_ended_by(clock, started)
    assert ended.outcome is Outcome.LOST
    assert "hung: no heartbeat for" in ended.reason
    assert not is_alive(pid)


@here
def test_who_asks_now_and_then_is_not_hung(start_cluster: StartCluster, clock: Clock) -> None:
    """A third of the timeout passes between two beats."""
    started = start_cluster("waits", heartbeat_timeout_s=NEVER_S)
    run_dir = started.start()
    started.until_event("began")

    def beat() -> int:
        (heartbeat,) = (run_dir / "logs" / "attempt-1").glob("heartbeat*")
        return heartbeat.stat().st_mtime_ns

    for _ in range(6):
        last = beat()
        wait_for(lambda last=last: beat() != last, "a heartbeat")
        clock.now_s += NEVER_S / 3
        started.cluster.poll(0)
    assert started.ended() is None
    assert is_alive(started.until_event("began")["pid"])


@here
@pytest.mark.parametrize("host", ["has_children", "leaves_children"])
def test_what_an_executor_started_goes_with_it(start_cluster: StartCluster, host: str) -> None:
    started = start_cluster(host)
    started.start()
    children = started.until_event("children")["pids"]
    if host == "has_children":
        os.kill(started.until_event("began")["pid"], signal.SIGKILL)
    started.until_ended()
    assert not any(map(is_alive, children))


@here
def test_closing_leaves_no_process(start_cluster: StartCluster) -> None:
    started = start_cluster("has_children", num_gpus=2)
    started.start("a", gpus=(0,))
    started.start("b", gpus=(1,))
    pids = []
    for task in "ab":
        pids += [*started.until_event("children", task)["pids"], started.until_event("began", task)["pid"]]
    assert all(map(is_alive, pids))
    started.cluster.close()
    assert not any(map(is_alive, pids))
    started.cluster.close()


@here
def test_two_tasks_run_side_by_side(start_cluster: StartCluster) -> None:
    started = start_cluster("waits", num_gpus=2)
    started.start("a", gpus=(0,))
    started.start("b", gpus=(1,))
    pids = [started.until_event("began", task)["pid"] for task in "ab"]
    assert all(map(is_alive, pids))
    started.cluster.stop("b")
    assert started.until_ended("b").outcome is Outcome.INTERRUPTED
    assert is_alive(pids[0])
    started.start("c", gpus=(1,))
    started.until_event("began", "c")


@here
@pytest.mark.parametrize(("task", "gpus"), [("b", (0,)), ("b", (1, 0)), ("b", ()), ("b", (1, 1)), ("a", (1,))], ids=str)
def test_a_launch_has_gpus_of_its_own(start_cluster: StartCluster, task: str, gpus: tuple[int, ...]) -> None:
    started = start_cluster("waits", num_gpus=2)
    started.start("a", gpus=(0,))
    with pytest.raises(ValueError, match=f"task '{task}'"):
        started.start(task, gpus=gpus)


@here
def test_gpus_are_free_again_when_their_executor_has_ended(start_cluster: StartCluster) -> None:
    started = start_cluster("works")
    started.start("a")
    started.until_ended("a")
    started.start("b")
    assert started.until_ended("b").outcome is Outcome.FINISHED


def test_the_ranks_of_an_executor_find_each_other_and_share_its_threads(
    start_cluster: StartCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    started = start_cluster("meeting_ranks:ranks_meet", num_gpus=2)
    started.start(gpus=(0, 1), num_ranks=2)
    ranks = started.until_event("met")["ranks"]
    assert started.until_ended().outcome is Outcome.FINISHED
    assert [(rank["RANK"], rank["LOCAL_RANK"], rank["WORLD_SIZE"]) for rank in ranks] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]
    assert ranks[0]["ALTO_RENDEZVOUS"] == ranks[1]["ALTO_RENDEZVOUS"]
    assert not Path(ranks[0]["ALTO_RENDEZVOUS"]).exists()
    num_threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert {rank["OMP_NUM_THREADS"] for rank in ranks} == {num_threads}


def start_ranks(start_cluster: StartCluster, **timeouts: float) -> tuple[Started, list[int]]:
    """Start two ranks that take turns; return their processes."""
    started = start_cluster("ranks_take_turns", num_gpus=2, **timeouts)
    started.start(gpus=(0, 1), num_ranks=2)
    pids = started.until_event("began")["pids"]
    assert all(map(is_alive, pids))
    return started, pids


def test_ranks_that_are_asked_to_stop_end_together(start_cluster: StartCluster) -> None:
    started, pids = start_ranks(start_cluster)
    started.cluster.stop("a")
    ended = started.until_ended()
    assert (ended.outcome, ended.reason) == (Outcome.INTERRUPTED, "stopped on request, with everything on disk")
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize(("rank", "culprit"), [(0, "its process"), (1, "rank 1")])
def test_a_killed_rank_ends_its_executor_and_is_named(start_cluster: StartCluster, rank: int, culprit: str) -> None:
    started, pids = start_ranks(start_cluster, heartbeat_timeout_s=NEVER_S, drain_timeout_s=NEVER_S)
    os.kill(pids[rank], signal.SIGKILL)
    ended = started.until_ended()
    assert ended.outcome is Outcome.LOST
    assert f"{culprit} was killed by SIGKILL" in ended.reason
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_found(start_cluster: StartCluster, rank: int) -> None:
    started, pids = start_ranks(start_cluster, heartbeat_timeout_s=3, drain_timeout_s=NEVER_S)
    os.kill(pids[rank], signal.SIGSTOP)
    ended = started.until_ended()
    assert ended.outcome is Outcome.LOST
    assert "hung" in ended.reason
    assert not any(map(is_alive, pids))


@here
@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        ("DataFormatError", Outcome.FAILED, "as the test wants it"),
        ("DeviceMemoryError", Outcome.LOST, "as the test wants it"),
        ("anything else", Outcome.LOST, "RuntimeError: as the test wants it"),
    ],
)
def test_an_error_of_one_rank_is_how_the_executor_ends(
    start_cluster: StartCluster, error: str, outcome: Outcome, reason: str
) -> None:
    started = start_cluster("last_rank_fails", num_gpus=2)
    (started.run_dir("a") / "error").write_text(error, encoding="utf-8")
    started.start(gpus=(0, 1), num_ranks=2)
    ended = started.until_ended()
    assert (ended.outcome, ended.reason) == (outcome, reason)


@here
def test_closing_leaves_no_rank(start_cluster: StartCluster) -> None:
    started, pids = start_ranks(start_cluster)
    started.cluster.close()
    assert not any(map(is_alive, pids))


@here
def test_an_executor_uses_its_share_of_the_cores_alone(
    start_cluster: StartCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    started = start_cluster("tells_devices", num_gpus=2)
    started.start(gpus=(1,))
    assert started.until_event("devices")["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)


@here
def test_a_torn_line_is_reported_when_it_is_complete(start_cluster: StartCluster) -> None:
    started = start_cluster("tears_a_line")
    run_dir = started.start()
    wait_for((run_dir / "torn").exists, "half a line", meanwhile=started.poll)
    started.poll()
    assert [line["event"] for line in started.lines_of()] == ["began"]
    (run_dir / "go").touch()
    started.until_ended()
    assert [line["event"] for line in started.lines_of()] == ["began", "step"]


@here
def test_an_attempt_that_goes_back_tells_only_what_it_writes_itself(start_cluster: StartCluster) -> None:
    started = start_cluster("goes_back")
    lines = [f'{{"seq": {seq}, "time": {seq}.5, "event": "step", "step": {seq}}}\n' for seq in range(4)]
    (started.run_dir("a") / "journal.jsonl").write_text("".join(lines) + '{"seq": 4, "ti', encoding="utf-8")
    started.start(attempt=2)
    assert started.until_ended(attempt=2).outcome is Outcome.FINISHED
    assert [(line["seq"], line["event"]) for line in started.lines_of(attempt=2)] == [(2, "task_resumed"), (3, "step")]
    assert all(event.attempt == 2 for event in started.events if isinstance(event, EntryWritten | AttemptEnded))


@here
def test_an_executor_that_cannot_start_is_lost(start_cluster: StartCluster, tmp_path: Path) -> None:
    started = start_cluster("works")
    (started.run_dir("a") / "logs").write_text("no folder", encoding="utf-8")
    started.start()
    assert started.until_ended().outcome is Outcome.LOST
    started.start("b")
    assert started.until_ended("b").outcome is Outcome.FINISHED
