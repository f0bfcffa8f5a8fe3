"""Simulation files: the measured shares, and mistakes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from alto.early_exit import policy_from
from alto.early_exit.recording import Recording
from alto.early_exit.replay import replay
from alto.errors import SpecError
from alto.spec import ArrivingTask, EarlyExit, Simulation, load_simulation, simulation
from alto.spec.simulation import MEASURED_EXIT_SHARES

ROOT = Path(__file__).parents[2]


def test_the_example_is_valid():
    assert load_simulation(ROOT / "examples" / "simulation.yaml").nodes == 4


def test_the_default_shares_are_those_of_the_recording():
    recording = Recording.read(ROOT / "benchmarks" / "recordings" / "gsm8k-alto-tiny.json.gz")
    settings = EarlyExit()
    left = 1 - replay(recording, policy_from(settings), settings.ema_alpha).samples_saved
    assert min(MEASURED_EXIT_SHARES) <= round(left, 3) <= max(MEASURED_EXIT_SHARES)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"arrivals": "poisson"}, "Give both or neither"),
        ({"gpus": {0: 1.0}}, "numbers of GPUs to shares"),
        ({"duration_p99_s": 1.0}, "above duration_median_s"),
        ({"early_exit_shares": [0.0]}, "shares above 0"),
        ({"duration_median_s": 1e-320}, "duration_median_s .* >= 0.001"),
        ({"gpu_mtbf_hours": 1e-9}, "gpu_mtbf_hours .* >= 0.01"),
        ({"gpu_repair_hours": 1e-9}, "gpu_repair_hours .* >= 0.01"),
        ({"max_attempts": 10**9}, "max_attempts .* <= 1000"),
        ({"checkpoint_interval_s": 1e300}, "checkpoint_interval_s .* <= "),
    ],
)
def test_values_that_contradict_are_refused(values: dict[str, object], message: str):
    with pytest.raises(SpecError, match=message):
        Simulation(**values)


def written(folder: Path, text: str) -> Path:
    (folder / "tasks.jsonl").write_text(text, encoding="utf-8")
    (folder / "simulation.yaml").write_text("trace: tasks.jsonl\n", encoding="utf-8")
    return folder / "simulation.yaml"


def test_a_trace_of_json_lines_is_read_and_blank_lines_are_not(tmp_path: Path):
    first = '{"arrival_s": 0, "duration_s": 10, "gpus": 2}'
    second = '{"arrival_s": 5, "duration_s": 1, "priority": 3, "tenant": "t"}'
    assert load_simulation(written(tmp_path, f"{first}\n\n{second}\n")).trace == (
        ArrivingTask(arrival_s=0, duration_s=10, gpus=2),
        ArrivingTask(arrival_s=5, duration_s=1, priority=3, tenant="t"),
    )


def test_a_trace_may_name_base_models(tmp_path: Path):
    (tmp_path / "tasks.csv").write_text("arrival_s,duration_s,base,step_share\n0,10,b,0.25\n0,10,,\n", "utf-8")
    (tmp_path / "file.yaml").write_text("trace: tasks.csv\nbases: 3\n", "utf-8")
    first, second = load_simulation(tmp_path / "file.yaml").trace or ()
    assert (first.base, first.step_share) == ("b", 0.25)
    assert (second.base, second.step_share) == ("", 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]\n", r"tasks.jsonl:1 should be a JSON object"),
        ('{"arrival_s": 0, "duration_s": 0}\n', r"tasks.jsonl:1: "),
        ("\n", "at least one task"),
        ('{"arrival_s": 0, "duration_s": 1}\n' * 3, "at most 2 tasks, found more"),
    ],
)
def test_an_invalid_trace_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str):
    monkeypatch.setattr(simulation, "MAX_TASKS", 2)
    with pytest.raises(SpecError, match=message):
        load_simulation(written(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("deep.jsonl", '{"arrival_s": ' + "[" * 100_000, "deep.jsonl:1 should be a JSON object"),
        ("short.jsonl", '{"arrival_s": 0, "duration_s": 1e-320}', "short.jsonl:1.*>= 0.001"),
        ("long.jsonl", '{"arrival_s": 0, "duration_s": 1e300}', "long.jsonl:1.*<= "),
        ("nan.csv", "arrival_s,duration_s\nnan,1\n", "nan.csv:2.*finite"),
        ("wide.csv", "arrival_s,duration_s\n0," + "1" * 200_000 + "\n", "wide.csv:2 should be a line of CSV"),
        ("none.csv", "arrival_s,duration_s\n0,1,2,3\n", "none.csv:2"),
    ],
    ids=lambda value: value[:12],
)
def test_a_trace_of_odd_values_is_refused_by_its_line(tmp_path: Path, name: str, text: str, message: str):
    (tmp_path / name).write_text(text, "utf-8")
    (tmp_path / "file.yaml").write_text(f"trace: {name}\n", "utf-8")
    with pytest.raises(SpecError, match=message):
        load_simulation(tmp_path / "file.yaml")


def test_a_trace_that_never_ends_or_never_begins_is_refused_at_once(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for trace_file in ("/dev/zero", "pipe", "."):
        (tmp_path / "file.yaml").write_text(f"trace: {trace_file}\n", "utf-8")
        with pytest.raises(SpecError, match="trace should be a readable file of tasks"):
            load_simulation(tmp_path / "file.yaml")
