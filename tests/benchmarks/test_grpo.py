"""The benchmark of reinforcement learning at its smallest scale."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("trl", reason="the baseline needs the extra 'bench'")

from benchmarks import grpo

pytestmark = [
    pytest.mark.slow("benchmarks"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def test_the_smallest_scale_has_all_figures(tmp_path, monkeypatch):
    monkeypatch.setenv("ALTO_CACHE", str(tmp_path / "cache"))
    assert grpo.main(["--scale", "smoke", "--threads", "1", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "grpo-smoke.json").read_text(encoding="utf-8"))
    assert set(grpo.GOALS) <= set(found["figures"])
    assert all(found["figures"][name] > 0 for name in ("batched_over_trl", "early_exit_over_trl"))
    assert [row["system"] for row in found["rows"]] == ["trl", "trl", "parity", "batched", "early exit"]


def test_a_winner_that_learned_nothing_fails_the_gate():
    assert grpo.gate(0.1, 0.5) == []
    assert grpo.gate(0.1, 0.1) == ["expected a reward above the base model's 0.1, found 0.1"]
