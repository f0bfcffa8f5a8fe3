"""The benchmark of tasks in one process: figures, gate, and a real run at its smallest scale."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import alto
from alto.records import TaskOutcome
from benchmarks import colocation

RESULT = TaskOutcome(
    task="a",
    run_dir="runs/a",
    adapter_dir="runs/a/best",
    best_job="job-000",
    best_validation_loss=2.0,
    jobs=(),
    duration_s=1.0,
)
DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def run(seconds: float, num_executors: int, *, loss: float = 2.0, job: str = "job-000") -> colocation.Run:
    result = alto.TaskResult(dataclasses.replace(RESULT, best_validation_loss=loss, best_job=job))
    return colocation.Run(seconds=seconds, results=[result], most_processes=num_executors)


SEPARATE = [run(30.0, 6), run(33.0, 6), run(90.0, 6)]


def test_figures_are_ratios_of_medians() -> None:
    planned = [run(11.0, 2), run(22.0, 2), run(44.0, 2)]
    runs = {"separate": SEPARATE, "colocated": [run(11.0, 1), run(10.0, 1), run(12.0, 1)], "planned": planned}
    same = {"separate": SEPARATE, "colocated": [run(33.0, 1)], "planned": planned}
    starts = {"cold": [8.0, 9.0, 8.5], "forked": [2.0, 1.7, 1.6], "kept": [0.85, 0.8, 0.9]}
    found = colocation.figures({"cot_flan": runs, "gsm8k": same}, starts, {50: 100, 1000: 100})
    assert found == pytest.approx(
        {
            "planned_over_best": 0.5,
            "colocated_over_separate": 3.0,
            "colocated_over_separate_gsm8k": 1.0,
            "start_over_cold": 0.1,
            "forked_start_over_cold": 0.2,
            "jain_index": 1.0,
        }
    )
    assert colocation.gate(runs) == []


@pytest.mark.parametrize(
    ("colocated", "message"),
    [
        (run(10.0, 2), "colocated: 2 executors"),
        (run(10.0, 1, loss=2.01), "a: job-000 at 2.00000 by itself, job-000 at 2.01000 colocated"),
        (run(10.0, 1, job="job-001"), "a: job-000 at 2.00000 by itself, job-001 at"),
    ],
)
def test_the_gate_refuses(colocated: colocation.Run, message: str) -> None:
    (failure,) = colocation.gate({"separate": SEPARATE, "colocated": [colocated], "planned": SEPARATE})
    assert failure.startswith(message)


@pytest.mark.slow("minutes")
@pytest.mark.skipif(not DATA.exists(), reason=f"needs {DATA}")
def test_the_smallest_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALTO_CACHE", str(tmp_path / "cache"))
    assert colocation.main(["--scale", "smoke", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "colocation-smoke.json").read_text("utf-8"))
    assert result["gate"] == "passed", result["notes"]
    assert result["figures"].keys() >= {"planned_over_best", "colocated_over_separate", "start_over_cold", "jain_index"}
