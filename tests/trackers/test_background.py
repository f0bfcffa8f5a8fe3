"""Hostile trackers: whatever they do, training neither waits nor fails nor grows, and one warning says so."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from journals import entry
from observers import pass_time_for

from alto.trackers.base import JobOutcome, Point, TrackedRun
from alto.trackers.feed import BackgroundTracker, tracking

Event = dict[str, Any]

CALLS = ("start", "log", "end_job", "finish")

LIMIT_S = 120.0
"""For what takes milliseconds where the machine is not busy."""


class Tracker:
    """Keeps which calls it got, and does ``mischief`` when it gets ``when``."""

    def __init__(self, when: str = "", mischief: Callable[[], object] = lambda: None) -> None:
        self.calls: list[str] = []
        self._when, self._mischief = when, mischief

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self._when:
            self._mischief()

    def start(self, run: TrackedRun) -> None:
        self._note("start")

    def log(self, job: str, points: Sequence[Point]) -> None:
        self._note("log")

    def end_job(self, job: str, outcome: JobOutcome) -> None:
        self._note("end_job")

    def finish(self, best_job: str | None) -> None:
        self._note("finish")


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


ERRORS = [RuntimeError("server\nis down"), SystemExit(3), KeyboardInterrupt(), MemoryError(), UnspeakableError()]


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a hanging tracker waits for; opened at the end, so that its thread ends."""
    gate = threading.Event()
    yield gate
    gate.set()


def show(events: Sequence[Event], trackers: dict[str, Tracker], run_dir: Path, **settings: Any) -> None:
    with tracking(trackers, run_dir, **settings) as observers:
        for event in events:
            for observe in observers:
                observe(entry(event))


def test_slow_tracker_hears_everything_before_the_end(
    small_run: list[Event], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker("log", lambda: time.sleep(0.01))
    show(small_run, {"slow": tracker}, tmp_path)
    assert tracker.calls.count("log") == sum(event["event"] in ("train", "eval") for event in small_run)
    assert tracker.calls.count("end_job") == 4
    assert (tracker.calls[0], tracker.calls[-1]) == ("start", "finish")
    assert not caplog.messages


@pytest.mark.parametrize("when", CALLS)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_tracker_that_raises_is_told_nothing_more(
    small_run: list[Event], tmp_path: Path, caplog: pytest.LogCaptureFixture, when: str, error: BaseException
) -> None:
    def mischief() -> None:
        raise error

    bad, good = Tracker(when, mischief), Tracker()
    show(small_run, {"bad": bad, "good": good}, tmp_path)
    assert bad.calls[-1] == when
    assert bad.calls.count(when) == 1
    assert good.calls[-1] == "finish"
    (message,) = caplog.messages
    assert message.startswith("tracker bad failed and gets no more events; training continues without it. ")
    assert type(error).__name__ in message
    assert "\n" not in message


@pytest.mark.parametrize("when", CALLS)
def test_tracker_that_hangs_delays_the_end_by_the_timeout_and_no_other_tracker(
    small_run: list[Event],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    gate: threading.Event,
    when: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that stands still but while somebody waits for the tracker that hangs."""
    waits_s = pass_time_for("hanging", monkeypatch)
    hanging, good = Tracker(when, gate.wait), Tracker()
    show(small_run, {"hanging": hanging, "good": good}, tmp_path, flush_timeout_s=30.0)
    assert waits_s == [30.0, 0.0]
    assert good.calls[-1] == "finish"
    (message,) = caplog.messages
    assert message.startswith("tracker hanging did not finish in time")


def test_tracker_that_is_given_up_warns_once(
    small_run: list[Event], tmp_path: Path, caplog: pytest.LogCaptureFixture, gate: threading.Event
) -> None:
    def hang_then_fail() -> None:
        gate.wait()
        raise RuntimeError("too late")

    tracker = Tracker("log", hang_then_fail)
    worker = BackgroundTracker("late", tracker, tmp_path)
    for event in small_run:
        worker.observe(entry(event))
    worker.end()
    worker.join(0.05)
    gate.set()
    worker.join(LIMIT_S)
    assert tracker.calls == ["start", "log"]
    assert len(caplog.messages) == 1


def test_events_beyond_the_bound_are_dropped_and_counted(
    small_run: list[Event], tmp_path: Path, caplog: pytest.LogCaptureFixture, gate: threading.Event
) -> None:
    started = threading.Event()

    def hang() -> None:
        started.set()
        gate.wait()

    tracker = Tracker("start", hang)
    worker = BackgroundTracker("lagging", tracker, tmp_path, max_waiting=10)
    worker.observe(entry(small_run[0]))
    assert started.wait(LIMIT_S)
    losses = next(event for event in small_run if event["event"] == "eval")
    for _ in range(1000):
        worker.observe(entry(losses))
    gate.set()
    worker.end()
    worker.join(LIMIT_S)
    assert tracker.calls == ["start", *["log"] * 10, "finish"]
    (message,) = caplog.messages
    assert message.startswith("tracker lagging could not keep up and missed 990 events")


def test_error_of_the_training_passes_through_and_trackers_are_finished(small_run: list[Event], tmp_path: Path) -> None:
    def train() -> None:
        with tracking({"good": tracker}, tmp_path) as (observe,):
            observe(entry(small_run[0]))
            raise OSError("disk full")

    tracker = Tracker()
    with pytest.raises(OSError, match="disk full"):
        train()
    assert tracker.calls == ["start", "finish"]


def test_hanging_tracker_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    code = f"""
import threading
from pathlib import Path
from alto.runs.events import decode
from alto.trackers.feed import tracking

class Hanging:
    def start(self, run):
        threading.Event().wait()

with tracking({{"hanging": Hanging()}}, Path({str(tmp_path)!r}), flush_timeout_s=0.1) as (observe,):
    observe(decode({{"seq": 0, "time": 0.0, "event": "task_started", "jobs": []}}))
print("trained")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout == "trained\n"
    assert done.stderr.startswith("tracker hanging did not finish in time")
