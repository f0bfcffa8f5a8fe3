"""The sweep at its smallest scale: all three systems, both gates, the result file and the recording."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="the baseline needs the extra 'bench'")

from alto.early_exit import Recording
from benchmarks.common import ROOT
from benchmarks.sweep import main

pytestmark = pytest.mark.slow("benchmarks")

GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"


@pytest.mark.filterwarnings("ignore")  # three libraries warn about each other here
@pytest.mark.skipif(not GSM8K.exists(), reason=f"needs GSM8K at {GSM8K}")
def test_the_smallest_sweep_passes_its_gates(tmp_path: Path) -> None:
    recording = tmp_path / "recording.json.gz"
    assert main(["--scale", "smoke", "--out", str(tmp_path), "--recording", str(recording), "--threads", "1"]) == 0
    result = json.loads((tmp_path / "sweep-smoke.json").read_text(encoding="utf-8"))
    assert result["gate"] == "passed"
    assert result["figures"]["batched_over_sequential"] > 0
    # Early exit may stop the better of the two after a step or two; a broken training would be far off.
    assert 0.9 < result["figures"]["best_loss_over_sequential"] < 1.3
    assert [row["job"] for row in result["rows"] if "job" in row] == ["job-000", "job-001"]
    assert len(Recording.read(recording).jobs) == 2
