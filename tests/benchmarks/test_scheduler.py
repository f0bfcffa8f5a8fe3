"""The scheduler's benchmark at its smallest scale: its rows, its figures, its gate."""

from __future__ import annotations

import json

import pytest
import schedules

from benchmarks import scheduler

pytestmark = pytest.mark.slow("benchmarks")


def test_the_smallest_scale_is_valid_and_no_worse_than_lpt(tmp_path):
    assert scheduler.main(["--scale", "smoke", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "scheduler-smoke.json").read_text(encoding="utf-8"))
    assert found["gate"] == "passed"
    assert {row["case"] for row in found["rows"]} == {"paper", "gap_20_16", "replan", "simulated", "ablation_8_gpus"}
    assert found["figures"]["paper_case_sjf_over_cp_sat"] > 1.2
    assert found["figures"]["ablation_8_gpus"] > 5
    assert found["figures"]["gap_20_16"] <= found["figures"]["lpt_gap_20_16"]


def test_the_gate_refuses_an_invalid_schedule_and_one_worse_than_lpt():
    row = {"case": "paper", "seed": 0, "makespan_s": 2.0, "invalid": ""}
    good = [row | {"method": "cp-sat"}, row | {"method": "lpt"}]
    assert scheduler.gate(good) == []
    assert scheduler.gate([good[0] | {"makespan_s": 2.1}, good[1]]) == ["paper 0: cp-sat ends after lpt"]
    assert scheduler.gate([good[0] | {"invalid": "overlaps"}, good[1]]) == ["paper 0 cp-sat: overlaps"]


def test_every_goal_of_the_cpu_scale_has_its_workload():
    size = scheduler.SIZES["cpu"]
    named = {workload.figure for workload in size.workloads} | {"paper_case_s", f"replan_{size.replan_tasks}_s"}
    assert set(scheduler.GOALS) <= named | {f"simulate_{size.simulated_tasks}_s"}


def test_the_paper_case_is_that_of_the_tests():
    assert scheduler.paper_case() == schedules.paper_case()
