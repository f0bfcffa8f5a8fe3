"""The recordings of preferences: every job of a sweep to its end, with the accuracies of its evaluations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs the peers: pip install -r benchmarks/peers.txt")

from alto.early_exit import Recording
from benchmarks.common import PREFERENCE_PAIRS
from tools import record_preferences


def test_every_job_is_trained_to_its_end_and_has_accuracies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not PREFERENCE_PAIRS.exists():
        pytest.skip(f"needs preference pairs at {PREFERENCE_PAIRS}")
    small = replace(
        record_preferences.SIZE, train=40, validation=4, learning_rates=(2e-3, 1.0), ranks=(8,), batch_sizes=(2,)
    )
    monkeypatch.setattr(record_preferences, "SIZE", small)
    assert record_preferences.main(["--seeds", "2", "--output", str(tmp_path)]) == 0
    recording = Recording.read(tmp_path / "dpo-alto-tiny-2.json.gz")
    assert [len(job.train_losses) for job in recording.jobs] == [20, 20]
    for job in recording.jobs:
        assert job.config["seed"] == 2
        assert [step for step, _ in job.evaluations] == [1, *range(2, 21, 2)]
        assert all(0 <= accuracy <= 1 for accuracy in job.metrics["reward_accuracy"])
        assert job.start is not None
