"""A user's own cluster that starts executors itself: the example of docs/clusters.md, as an installed package."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import packages
import pytest
from clusters import Started, is_alive
from tiny import make_task

import alto
from alto.cluster import Outcome, open_cluster
from alto.runs import read_events

FILES = packages.files_of("clusters.md", after="### A cluster that starts executors itself")

Start = Callable[[str], Started]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """``start(host)``: two slots whose executors run that host of ``cluster_hosts``."""
    packages.install(tmp_path / "package", FILES, monkeypatch)
    opened = []

    def started(host: str) -> Started:
        opened.append(open_cluster(f"plain://{tmp_path}/logs", total_gpus=2))
        return Started(opened[-1], tmp_path, host)

    yield started
    for cluster in opened:
        cluster.close()
        cluster.close()


def test_an_executor_tells_its_journal_and_then_that_it_finished(start: Start) -> None:
    started = start("works")
    started.start()
    ended = started.until_ended()
    assert (ended.outcome, ended.reason) == (Outcome.FINISHED, "")
    assert [line["event"] for line in started.lines_of()] == ["began", "done"]
    assert started.cluster.poll(0) == []


@pytest.mark.parametrize(("error", "outcome"), [("SpecError", Outcome.FAILED), ("anything else", Outcome.LOST)])
def test_what_an_error_means_for_the_next_attempt(start: Start, error: str, outcome: Outcome, tmp_path: Path) -> None:
    started = start("fails")
    (started.run_dir("a") / "error").write_text(error, encoding="utf-8")
    started.start()
    ended = started.until_ended()
    assert ended.outcome is outcome
    assert "as the test wants it" in ended.reason
    assert "as the test wants it" in (tmp_path / "logs" / "a.log").read_text(encoding="utf-8")


def test_who_is_asked_to_stop_saves_and_ends(start: Start) -> None:
    started = start("waits")
    started.start()
    pid = started.until_event("began")["pid"]
    started.cluster.stop("a")
    ended = started.until_ended()
    assert ended.outcome is Outcome.INTERRUPTED
    assert started.lines_of()[0]["event"] == "began"
    assert not is_alive(pid)


def test_who_is_asked_to_stop_while_it_loads_does(start: Start) -> None:
    started = start("loads")
    started.start()
    started.until_event("loading")
    started.cluster.stop("a")
    assert started.until_ended().outcome is Outcome.INTERRUPTED


def test_a_killed_executor_is_found_and_closing_kills_the_others(start: Start, tmp_path: Path) -> None:
    started = start("waits")
    started.start("a", gpus=(0,))
    started.start("b", gpus=(1,))
    killed, other = (started.until_event("began", task)["pid"] for task in "ab")
    os.kill(killed, signal.SIGKILL)
    ended = started.until_ended("a")
    assert (ended.outcome, ended.reason) == (
        Outcome.LOST,
        f"its process ended with exit code -9; see {tmp_path}/logs/a.log",
    )
    assert is_alive(other)
    started.cluster.close()
    assert not is_alive(other)


def test_it_runs_a_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages.install(tmp_path / "package", FILES, monkeypatch)
    engine = alto.Engine(cluster=f"plain://{tmp_path}/logs", total_gpus=2, output_dir=tmp_path / "runs")
    with engine.queue(method="lpt") as queue:
        first = queue.submit(make_task(tmp_path, name="first", num_train_epochs=1))
    (result,) = queue.results()
    assert Path(result.adapter_dir).is_dir()
    assert (tmp_path / "logs" / f"{first}.log").is_file()
    ends = [
        event["outcome"] for event in read_events(queue.root / "journal.jsonl") if event["event"] == "executor_ended"
    ]
    assert ends == ["finished"]
