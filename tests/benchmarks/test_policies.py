"""The replay of policies at its smallest scale, and that its gate bites."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("matplotlib", reason="recordings are read with the bench extra: pip install -e '.[bench]'")

from benchmarks.policies import program as policies
from benchmarks.policies import times

pytestmark = pytest.mark.slow("benchmarks")


def test_the_smallest_scale_passes_its_gate(tmp_path):
    assert policies.main(["--scale", "smoke", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "policies-smoke.json").read_text(encoding="utf-8"))
    assert found["gate"] == "passed"
    assert set(policies.GOALS) <= set(found["figures"])
    recordings = {row["recording"] for row in found["rows"]}
    assert len(found["rows"]) == len(recordings) * len(policies.POLICIES)
    assert {"ASHA", "Hyperband", "median pruner", "halving, eta 2", "paper"} <= {row["policy"] for row in found["rows"]}


def test_a_recording_that_does_not_know_the_base_fails_the_gate(tmp_path, monkeypatch):
    read = policies.Recording.read

    def forgetful(path):
        found = read(path)
        return replace(found, jobs=(*found.jobs[:-1], replace(found.jobs[-1], start=None)))

    monkeypatch.setattr(policies.Recording, "read", forgetful)
    assert policies.main(["--scale", "cpu", "--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "policies-cpu.json").read_text(encoding="utf-8"))
    assert found["figures"] == {}
    assert "the base's validation loss of every job" in " ".join(found["notes"])


def test_in_time_a_share_for_evaluations_takes_less_than_all_rows(tmp_path):
    assert times.main(["--scale", "smoke", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "times-smoke.json").read_text(encoding="utf-8"))
    assert found["gate"] == "passed"
    by = {(row["recording"], row["ratio"], row["policy"]): row for row in found["rows"]}
    for (recording, ratio, policy), row in by.items():
        if policy == "default":
            assert row["evaluating"] < by[recording, ratio, "all rows"]["evaluating"]


def test_another_winner_than_that_of_the_executor_fails_the_gate_of_times(tmp_path, monkeypatch):
    monkeypatch.setattr(times, "planned", lambda job, settings, num_rows: [(*job.evaluations[-1], num_rows)])
    assert times.main(["--scale", "smoke", "--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "times-smoke.json").read_text(encoding="utf-8"))
    assert found["figures"] == {}
