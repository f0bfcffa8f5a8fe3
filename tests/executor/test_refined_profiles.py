"""Measurements on a busy machine are recognised, and runs correct them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from profiles import MEASURED
from rich.console import Console
from tiny import make_task, save_model

from alto.engine.runner import TaskRunner
from alto.errors import SpecError
from alto.executor import cache
from alto.executor.profiling import meter, profile
from alto.executor.profiling.measure import Measured
from alto.executor.profiling.meter import CoreTime, spread_of
from alto.executor.profiling.profile import StepTimes
from alto.records import UNSTEADY, TaskPlan, Throughput
from alto.spec import Task
from alto.views import plan_text

pytestmark = pytest.mark.usefixtures("empty_cache")

KEY = {"measured": "by hand"}


def with_spread(spread: float) -> Measured:
    return replace(MEASURED, durations=tuple(replace(point, spread=spread) for point in MEASURED.durations))


@pytest.mark.parametrize(
    ("durations_s", "expected"),
    [
        ([1.0], 0.0),
        ([2.0, 2.0, 2.0], 0.0),
        ([1.0, 2.0, 3.0], 1.0),  # few values: the fastest
        ([4.0, 1.0, 1.0, 1.0], 0.0),  # one disturbed value changes nothing
        ([0.1, *[1.0] * 10, *[1.5] * 9], 0.0),  # many values: one that is too fast changes nothing
        ([*[1.0] * 5, *[1.5] * 15], 0.5),
    ],
)
def test_the_spread_is_between_the_fastest_tenth_and_the_median(durations_s: list[float], expected: float) -> None:
    assert spread_of(durations_s) == pytest.approx(expected)


def test_a_thread_that_waits_for_a_core_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for thread, times in {"1": "2000000000 1000000000 7", "2": "3000000000 500000000 9"}.items():
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(f"{times}\n")
    monkeypatch.setattr(meter, "_TASKS", tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    before = CoreTime.now()
    assert before == CoreTime(ran_s=5.0, waited_s=1.5)
    assert before.waited_since() == 0.0, "nothing ran"
    (tmp_path / "1" / "schedstat").write_text("4000000000 4000000000 8\n")
    assert before.waited_since() == 1.5, "3 s of waiting for 2 s of work"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10**6)
    assert before.waited_since() == 0.0, "its own threads wait for each other"
    monkeypatch.setattr(meter, "_TASKS", tmp_path / "none")
    assert CoreTime.now() == CoreTime(ran_s=0.0, waited_s=0.0)


def throughput(measured: Measured = MEASURED) -> Throughput:
    """Return a forecast of 0.1 seconds for each 100 tokens of a step."""
    return Throughput(step_s=0.0, job_s=0.0, token_s=1e-3, eval_token_s=1e-4, points=measured.durations)


def trained(expected: Throughput, ratios: Sequence[float]) -> StepTimes:
    """Return the times of a step per ratio, which takes ``ratio`` times the forecast."""
    forecast: Any = SimpleNamespace(throughput=expected, profile=cache.name_of(KEY))
    times = StepTimes(forecast)
    jobs: list[Any] = [SimpleNamespace(next_step_tokens=40), SimpleNamespace(next_step_tokens=60)]
    for ratio in ratios:
        times.note(jobs, 0.1 * ratio)
    return times


def cached() -> Measured:
    return Measured.from_dict(cache.load("profiles", KEY))


@pytest.mark.parametrize(
    ("spread", "ratios", "waited", "factor"),
    [
        (0.0, [0.5] * 20, 0.0, 0.5),
        (0.0, [2.0] * 20, 0.0, 2.0),  # the forecast was wrong
        (0.0, [2.0] * 20, 0.5, 1.0),  # the machine is busy now
        (0.5, [2.0] * 20, 0.5, 2.0),  # it was busy then as well
        (0.5, [0.5] * 20, 0.0, 0.5),
        (0.5, [1.05] * 20, 0.0, 1.0),  # as measured
        (0.0, [0.5] * 7, 0.0, 1.0),  # too few steps
        (0.0, [*[0.5] * 15, *[9.0] * 5], 0.0, 0.5),
        (0.0, [*[0.5] * 64, *[9.0] * 300], 0.0, 0.5),  # only every eighth of the later steps counts
    ],
)
def test_a_measurement_is_corrected_by_the_steps_that_were_trained(
    monkeypatch: pytest.MonkeyPatch, spread: float, ratios: list[float], waited: float, factor: float
) -> None:
    monkeypatch.setattr(CoreTime, "waited_since", lambda before: waited)
    before = with_spread(spread)
    cache.save("profiles", KEY, before.to_dict())
    trained(throughput(before), ratios).refine()
    found = cached()
    assert [point.duration_s for point in found.durations] == pytest.approx(
        [factor * point.duration_s for point in before.durations]
    )
    assert found.eval_token_s == pytest.approx(factor * before.eval_token_s)
    assert (found.memory, found.capacity_bytes) == (before.memory, before.capacity_bytes)
    if factor != 1.0:
        assert [point.spread for point in found.durations] == pytest.approx([waited, waited])


def test_two_runs_that_began_with_the_same_measurement_correct_it_once() -> None:
    cache.save("profiles", KEY, MEASURED.to_dict())
    runs = [trained(throughput(), [0.5] * 20) for _ in range(2)]
    for run in runs:
        run.refine()
    assert cached().durations[0].duration_s == pytest.approx(0.5 * MEASURED.durations[0].duration_s)


def test_what_was_measured_again_or_is_gone_stays_as_it_is() -> None:
    times = trained(throughput(), [0.5] * 20)
    times.refine()
    assert cache.load("profiles", KEY) is None
    again = replace(MEASURED, durations=tuple(replace(point, duration_s=7.0) for point in MEASURED.durations))
    cache.save("profiles", KEY, again.to_dict())
    times.refine()
    assert cached() == again


def measured_as(monkeypatch: pytest.MonkeyPatch, measured: Measured) -> None:
    monkeypatch.setattr(profile, "_measured_in_child", lambda *ignored, **settings: measured)


def planned(folder: Path, **changes: Any) -> tuple[Task, TaskPlan]:
    folder.mkdir(exist_ok=True)
    settings: dict[str, Any] = {"batch_size": 1, "search_space": {"lr": [1e-3, 3e-3]}} | changes
    task = make_task(folder, model=str(save_model(folder / "model")), **settings)
    return task, TaskRunner().plan(task)


@pytest.mark.parametrize("spread", [0.0, UNSTEADY, 0.8])
def test_a_plan_says_where_the_machine_was_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spread: float) -> None:
    measured_as(monkeypatch, with_spread(spread))
    _, plan = planned(tmp_path)
    shown = StringIO()
    Console(width=400, file=shown).print(plan_text(plan))
    notes = [note for note in plan.notes if "other programs used the machine" in note]
    assert len(notes) == (spread >= UNSTEADY)
    assert plan.throughput.is_unsteady == (spread >= UNSTEADY)
    if notes:
        assert f"{100 * spread:.0f} % longer" in notes[0]
        assert notes[0] in shown.getvalue()


def test_a_run_corrects_what_was_measured_and_is_packed_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake measurement has steps of at least 10 seconds; the model's real steps are faster on any machine."""
    slow = [replace(point, duration_s=100 * point.duration_s) for point in MEASURED.durations]
    measured_as(monkeypatch, replace(MEASURED, durations=tuple(slow)))
    task, before = planned(tmp_path / "task", early_exit=False, report_to="none")
    assert len(before.profile) == 24
    result = TaskRunner().begin(task, tmp_path / "runs")
    assert sum(job.steps for job in result.jobs) > 64
    after = TaskRunner().plan(task)
    assert after.is_cached
    factor = after.throughput.points[0].duration_s / before.throughput.points[0].duration_s
    assert factor < 0.9
    for old, new in zip(before.throughput.points, after.throughput.points, strict=True):
        assert new.duration_s == pytest.approx(factor * old.duration_s)
    assert after.expected_duration_s == pytest.approx(factor * before.expected_duration_s)
    for key in ("max_slots", "max_tokens_per_step", "max_tokens_per_pass", "memory", "peak_bytes"):
        assert getattr(after, key) == getattr(before, key), key


@pytest.mark.parametrize("spread", [0.0, 0.8])
def test_a_budget_that_is_too_small_by_a_measurement_on_a_busy_machine_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spread: float
) -> None:
    measured_as(monkeypatch, with_spread(spread))
    with pytest.raises(SpecError, match="expected enough to train one configuration") as caught:
        planned(tmp_path, search={"budget": {"duration_s": 1e-3}})
    assert ("alto plan --refresh measures again" in str(caught.value)) == (spread > 0.0)
