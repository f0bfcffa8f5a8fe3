"""The default policy against the paper's, by replay on the recordings in the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from alto.early_exit import Recording, policy_from, replay
from alto.records import ExitReason
from alto.spec import EarlyExit

RECORDINGS = sorted((Path(__file__).parents[2] / "benchmarks" / "recordings").glob("*.json.gz"))


def test_there_is_a_recording() -> None:
    assert RECORDINGS


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_the_default_keeps_no_worse_a_job_than_the_paper_and_saves_more(path: Path) -> None:
    recording = Recording.read(path)
    settings = {policy: EarlyExit(policy=policy) for policy in ("alto", "paper")}
    ours, papers = (replay(recording, policy_from(setting), setting.ema_alpha) for setting in settings.values())
    assert ours.regret <= min(papers.regret, 1.005)
    assert ours.samples_saved >= max(papers.samples_saved, 0.85)
    assert ours.saved_by[ExitReason.UNDERPERFORMING] > 0.5


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_without_a_policy_every_job_is_trained_to_its_end(path: Path) -> None:
    recording = Recording.read(path)
    result = replay(recording, policy_from(EarlyExit(enabled=False)), 0.1)
    assert result.regret == 1.0
    assert result.samples_saved == 0.0
    assert len(recording.jobs) == 60
