"""The data that trackers get of a run; a tracker that is slow, hangs or fails does not delay training."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from journals import entry
from observers import pass_time_for

from alto.trackers.base import JobOutcome, Point, TrackedRun
from alto.trackers.feed import BackgroundTracker, Feed, tracking

Event = dict[str, Any]


class Recorder:
    def __init__(self) -> None:
        self.runs: list[TrackedRun] = []
        self.points: dict[str, list[Point]] = {}
        self.outcomes: dict[str, JobOutcome] = {}
        self.finished: list[str | None] = []

    def start(self, run: TrackedRun) -> None:
        self.runs.append(run)

    def log(self, job: str, points: Sequence[Point]) -> None:
        self.points.setdefault(job, []).extend(points)

    def end_job(self, job: str, outcome: JobOutcome) -> None:
        self.outcomes[job] = outcome

    def finish(self, best_job: str | None) -> None:
        self.finished.append(best_job)

    def metric(self, job: str, name: str) -> dict[int, float]:
        return {point.step: point.metrics[name] for point in self.points[job] if name in point.metrics}


def recorded(events: Sequence[Mapping[str, Any]]) -> Recorder:
    recorder = Recorder()
    feed = Feed(recorder, Path("runs/maths-1"))
    for event in events:
        feed.apply(entry(event))
    feed.finish()
    return recorder


def test_a_run_is_reported_once_with_flat_settings(small_run: list[Event]) -> None:
    replayed = [{**event, "replayed": True} for event in small_run]
    (run,) = recorded(replayed).runs
    assert (run.name, run.run_dir) == ("maths-1", Path("runs/maths-1"))
    assert run.settings["model"] == "alto-tiny"
    assert run.settings["early_exit.policy"] == "alto"
    assert not {"seq", "time", "event", "jobs", "replayed"} & set(run.settings)


def test_configuration_is_split_into_what_varies_and_what_does_not(small_run: list[Event]) -> None:
    (run,) = recorded(small_run).runs
    assert run.fixed == {"seed": 1, "target_modules": ["q", "v"]}
    assert run.varying("d") == {"learning_rate": 2e-4, "r": 8, "lora_alpha": 16}


def test_every_loss_is_reported_at_its_step(small_run: list[Event]) -> None:
    recorder = recorded(small_run)
    assert recorder.metric("d", "train/loss") == dict.fromkeys(range(1, 101), 2.0)
    assert recorder.metric("d", "eval/loss") == {10: 2.1, 100: 1.9}
    assert recorder.metric("d", "eval/train_ema") == {10: 2.0, 100: 2.0}
    written = {event["time"] for event in small_run if event.get("job") == "d" and event["event"] == "train"}
    assert {point.time for point in recorder.points["d"] if "train/loss" in point.metrics} == written


def test_metrics_have_the_names_that_trl_gives_them(preference_run: list[Event]) -> None:
    recorder = recorded(preference_run)
    assert recorder.metric("b", "eval/rewards/accuracies") == {10: 0.75, 100: 0.7}
    assert recorder.metric("b", "eval/rewards/margins") == pytest.approx({10: 0.38, 100: 0.45})
    assert recorder.metric("b", "eval/rewards/chosen") == {10: 0.1, 100: 0.1}
    assert recorder.metric("b", "eval/rewards/rejected") == {10: 0.62, 100: 0.55}
    assert recorder.metric("b", "eval/kl") == {10: 0.02, 100: 0.02}
    assert (recorder.outcomes["b"].best_step, recorder.outcomes["b"].best_loss) == (10, 0.62)


def test_outcomes(small_run: list[Event]) -> None:
    recorder = recorded(small_run)
    reasons = {job: outcome.reason for job, outcome in recorder.outcomes.items()}
    assert reasons == {"a": "diverging", "b": "underperforming", "c": "overfitting", "d": "completed"}
    best = {job: (outcome.best_step, outcome.best_loss) for job, outcome in recorder.outcomes.items()}
    assert best == {"a": (0, None), "b": (10, 3.0), "c": (10, 2.2), "d": (100, 1.9)}
    assert recorder.finished == ["d"]


def test_numbers_that_are_not_finite_survive_the_journal(small_run: list[Event]) -> None:
    text = {math.nan: "nan", math.inf: "inf"}
    read_back = json.loads(
        json.dumps(small_run).replace("NaN", f'"{text[math.nan]}"').replace("Infinity", f'"{text[math.inf]}"')
    )
    recorder = recorded(read_back)
    assert recorder.metric("a", "train/loss")[1] == math.inf
    assert math.isnan(recorder.metric("a", "eval/loss")[10])
    assert recorder.outcomes["a"].best_loss is None


def test_job_added_while_the_task_runs_is_known_before_its_losses(small_run: list[Event]) -> None:
    added = {"event": "job_added", "time": 1.0, "job": "e", "origin": "d", "config": {"learning_rate": 5e-4}}
    recorder = recorded([small_run[0], added])
    assert recorder.runs[0].jobs["e"] == {"learning_rate": 5e-4}


def test_interrupted_run_has_no_best_job(small_run: list[Event]) -> None:
    assert recorded(small_run[:-1]).finished == [None]


def test_run_that_never_started_is_not_finished() -> None:
    assert recorded([]).finished == []


@pytest.mark.parametrize("event", ["task_resumed", "task_interrupted", "of_a_later_version"])
def test_other_events_are_passed_over(small_run: list[Event], event: str) -> None:
    recorder = recorded([small_run[0], {"event": event, "time": 1.0}])
    assert recorder.points == {}


CALLS = ("start", "log", "end_job", "finish")

LIMIT_S = 120.0
"""A limit for what takes milliseconds on an idle machine."""


class Tracker:
    """Records its calls, and does ``action`` at the call ``when``."""

    def __init__(self, when: str = "", action: Callable[[], object] = lambda: None) -> None:
        self.calls: list[str] = []
        self._when, self._action = when, action

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self._when:
            self._action()

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
    """The event that a hanging tracker waits for; set at the end, so that its thread ends."""
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
def test_a_tracker_that_raises_gets_nothing_more(
    small_run: list[Event], tmp_path: Path, caplog: pytest.LogCaptureFixture, when: str, error: BaseException
) -> None:
    def action() -> None:
        raise error

    bad, good = Tracker(when, action), Tracker()
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
    """The clock advances only while something waits for the hanging tracker."""
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
