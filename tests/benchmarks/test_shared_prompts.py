"""The benchmark of shared prompts at its smallest scale, and a gate that fails on wrong results."""

from __future__ import annotations

import json

import pytest

from benchmarks import shared_prompts
from benchmarks.common import PREFERENCE_PAIRS

DATA = PREFERENCE_PAIRS
pytestmark = [pytest.mark.slow("benchmarks"), pytest.mark.skipif(not DATA.exists(), reason=f"needs {DATA}")]


def test_the_smallest_scale_passes_its_gate(tmp_path):
    assert shared_prompts.main(["--scale", "smoke", "--threads", "1", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "shared_prompts-smoke.json").read_text(encoding="utf-8"))
    assert found["gate"] == "passed"
    assert found["rows"][0]["shared_tokens"] < found["rows"][0]["whole_tokens"]
    assert set(shared_prompts.GOALS) <= set(found["figures"])


def test_other_losses_fail_the_gate(tmp_path, monkeypatch):
    step = shared_prompts._Way.step

    def wrong(way):
        return [loss * (1 + 1e-3 * way.tokens_per_pair) for loss in step(way)]

    monkeypatch.setattr(shared_prompts._Way, "step", wrong)
    assert shared_prompts.main(["--scale", "smoke", "--threads", "1", "--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "shared_prompts-smoke.json").read_text(encoding="utf-8"))
    assert found["figures"] == {}
    assert "all: step 0: loss" in " ".join(found["notes"])
