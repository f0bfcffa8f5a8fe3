"""The default policy against the paper's, replayed on the recordings in the repository."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from alto.early_exit import Recording, policy_from, replay
from alto.records import ExitReason
from alto.spec import EarlyExit

FOLDER = Path(__file__).parents[2] / "benchmarks" / "recordings"
NUM_JOBS = {
    "dpo-alto-tiny-1.json.gz": 40,
    "dpo-alto-tiny-2.json.gz": 40,
    "dpo-alto-tiny-3.json.gz": 40,
    "dpo-seeds.json.gz": 24,
    "gsm8k-alto-tiny.json.gz": 60,
    "gsm8k-small.json.gz": 16,
    "gsm8k-warmup.json.gz": 32,
    "instructions-epochs.json.gz": 24,
    "real-dpo.json.gz": 8,
    "real-sweep12.json.gz": 12,
    "real-sweep24.json.gz": 8,
    "reasoning.json.gz": 32,
}
RECORDINGS = sorted(FOLDER.glob("*.json.gz"))


def test_every_recording_is_known() -> None:
    assert {path.name for path in RECORDINGS} == set(NUM_JOBS)


def test_the_default_keeps_no_worse_a_job_than_the_paper_and_saves_more() -> None:
    recording = Recording.read(FOLDER / "gsm8k-alto-tiny.json.gz")
    settings = {policy: EarlyExit(policy=policy) for policy in ("alto", "paper")}
    ours, papers = (replay(recording, policy_from(setting), setting.ema_alpha) for setting in settings.values())
    assert ours.regret <= min(papers.regret, 1.005)
    assert ours.samples_saved >= max(papers.samples_saved, 0.85)
    assert ours.saved_by[ExitReason.UNDERPERFORMING] > 0.5


@pytest.mark.parametrize(
    "path", [path for path in RECORDINGS if path.name.startswith("dpo-")], ids=lambda path: path.name
)
def test_on_pairs_a_better_job_is_kept_than_by_the_paper_and_by_the_default(path: Path) -> None:
    recording = Recording.read(path)
    ours, papers, default = (
        replay(recording, policy_from(settings), settings.ema_alpha)
        for settings in (EarlyExit(preset="preferences"), EarlyExit(policy="paper"), EarlyExit(preset="default"))
    )
    assert ours.regret < min(papers.regret, default.regret) - 0.01
    assert ours.samples_saved > 0.75


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_recordings_know_what_validation_gave_before_the_first_step(path: Path) -> None:
    assert all(job.start is not None for job in Recording.read(path).jobs)


def test_presets_save_more_the_greedier_they_are() -> None:
    recordings = [Recording.read(path) for path in RECORDINGS]
    saved = [
        statistics.fmean(
            replay(recording, policy_from(EarlyExit(preset=preset)), 0.1).samples_saved for recording in recordings
        )
        for preset in ("cautious", "default", "greedy")
    ]
    assert saved == sorted(saved)
    assert saved[0] > 0.75


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_without_a_policy_every_job_is_trained_to_its_end(path: Path) -> None:
    recording = Recording.read(path)
    result = replay(recording, policy_from(EarlyExit(enabled=False)), 0.1)
    assert result.regret == 1.0
    assert result.samples_saved == 0.0
    assert len(recording.jobs) == NUM_JOBS[path.name]
