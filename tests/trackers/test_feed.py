"""What a tracker is told of a run: its settings, every loss at its step, how jobs end, and what is resumed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from journals import entry

from alto.trackers.base import JobOutcome, Point, TrackedRun
from alto.trackers.feed import Feed

Event = dict[str, Any]


class Recorder:
    """A tracker that keeps what it is told."""

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


def told(events: Sequence[Mapping[str, Any]]) -> Recorder:
    recorder = Recorder()
    feed = Feed(recorder, Path("runs/maths-1"))
    for event in events:
        feed.apply(entry(event))
    feed.finish()
    return recorder


def test_run_is_told_once_with_flat_settings(small_run: list[Event]) -> None:
    replayed = [{**event, "replayed": True} for event in small_run]
    (run,) = told(replayed).runs
    assert (run.name, run.run_dir) == ("maths-1", Path("runs/maths-1"))
    assert run.settings["model"] == "alto-tiny"
    assert run.settings["early_exit.policy"] == "alto"
    assert not {"seq", "time", "event", "jobs", "replayed"} & set(run.settings)


def test_configuration_is_split_into_what_varies_and_what_does_not(small_run: list[Event]) -> None:
    (run,) = told(small_run).runs
    assert run.fixed == {"seed": 1, "target_modules": ["q", "v"]}
    assert run.varying("d") == {"learning_rate": 2e-4, "r": 8, "lora_alpha": 16}


def test_every_loss_is_told_at_its_step(small_run: list[Event]) -> None:
    recorder = told(small_run)
    assert recorder.metric("d", "train/loss") == dict.fromkeys(range(1, 101), 2.0)
    assert recorder.metric("d", "eval/loss") == {10: 2.1, 100: 1.9}
    assert recorder.metric("d", "eval/train_ema") == {10: 2.0, 100: 2.0}
    written = {event["time"] for event in small_run if event.get("job") == "d" and event["event"] == "train"}
    assert {point.time for point in recorder.points["d"] if "train/loss" in point.metrics} == written


def test_metrics_have_the_names_that_trl_gives_them(preference_run: list[Event]) -> None:
    recorder = told(preference_run)
    assert recorder.metric("b", "eval/rewards/accuracies") == {10: 0.75, 100: 0.7}
    assert recorder.metric("b", "eval/rewards/margins") == pytest.approx({10: 0.38, 100: 0.45})
    assert recorder.metric("b", "eval/rewards/chosen") == {10: 0.1, 100: 0.1}
    assert recorder.metric("b", "eval/rewards/rejected") == {10: 0.62, 100: 0.55}
    assert recorder.metric("b", "eval/kl") == {10: 0.02, 100: 0.02}
    assert (recorder.outcomes["b"].best_step, recorder.outcomes["b"].best_loss) == (10, 0.62)


def test_outcomes(small_run: list[Event]) -> None:
    recorder = told(small_run)
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
    recorder = told(read_back)
    assert recorder.metric("a", "train/loss")[1] == math.inf
    assert math.isnan(recorder.metric("a", "eval/loss")[10])
    assert recorder.outcomes["a"].best_loss is None


def test_job_added_while_the_task_runs_is_known_before_its_losses(small_run: list[Event]) -> None:
    added = {"event": "job_added", "time": 1.0, "job": "e", "origin": "d", "config": {"learning_rate": 5e-4}}
    recorder = told([small_run[0], added])
    assert recorder.runs[0].jobs["e"] == {"learning_rate": 5e-4}


def test_interrupted_run_has_no_best_job(small_run: list[Event]) -> None:
    assert told(small_run[:-1]).finished == [None]


def test_run_that_never_started_is_not_finished() -> None:
    assert told([]).finished == []


@pytest.mark.parametrize("event", ["task_resumed", "task_interrupted", "of_a_later_version"])
def test_other_events_are_passed_over(small_run: list[Event], event: str) -> None:
    recorder = told([small_run[0], {"event": event, "time": 1.0}])
    assert recorder.points == {}
