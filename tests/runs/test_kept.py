"""Which adapters and states a finished run keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
from journals import entries

from alto.errors import RunBusyError
from alto.runs import RunDir, RunHistory, kept_jobs, remove_states


@pytest.fixture
def run(write_run, small_run) -> RunDir:
    """``a`` diverged, ``b`` was dropped at the only rung, ``c`` overfitted after it, ``d`` won."""
    run = RunDir(write_run(small_run))
    for job in "abcd":
        for kind in ("best", "last", "start", "best.previous"):
            run.job(job, kind).mkdir(parents=True)
            (run.job(job, kind) / "adapter.safetensors").write_bytes(b"x" * 10)
    return run


def states(run: RunDir) -> list[str]:
    return sorted(str(path.relative_to(run.root / "jobs")) for path in run.root.glob("jobs/*/*"))


@pytest.mark.parametrize(("keep", "kept"), [("winner", "d"), ("finalists", "bcd"), ("all", "abcd")])
def test_each_rule_keeps_its_jobs(keep, kept, small_run):
    assert kept_jobs(RunHistory.of(entries(small_run)), keep) == {*kept}


def test_jobs_whose_answers_were_scored_are_finalists(judged_run):
    history = RunHistory.of(entries(judged_run))
    assert {score.job for score in history.finalists} <= kept_jobs(history, "finalists")
    assert kept_jobs(history, "winner") == {history.result.best_job}


def test_the_last_rung_counts_and_none_before_it(small_run):
    rung = next(event for event in small_run if event["event"] == "warmup_ended")
    later = {**rung, "rung": 1, "progress": 0.5, "kept": ["d"], "dropped": ["c"], "time": small_run[-2]["time"]}
    assert kept_jobs(RunHistory.of(entries([*small_run[:-1], later, small_run[-1]])), "finalists") == {"c", "d"}


@pytest.mark.parametrize(("keep", "kept", "freed"), [("winner", "d", 150), ("finalists", "bcd", 130)])
def test_only_best_adapters_of_kept_jobs_stay(keep, kept, freed, run, small_run):
    history = RunHistory.of(entries(small_run))
    assert remove_states(run, history, keep) == freed
    assert states(run) == [f"{job}/best" for job in kept]
    assert sorted(path.name for path in run.root.iterdir() if path.is_dir()) == ["jobs"]
    assert remove_states(run, history, keep) == 0


def test_all_is_all(run, small_run):
    before = states(run)
    assert remove_states(run, RunHistory.of(entries(small_run)), "all") == 0
    assert states(run) == before


def test_what_a_killed_removal_left_is_removed(run, small_run):
    (run.root / ".removed").mkdir()
    (run.root / "jobs" / "a").rename(run.root / ".removed" / "a")
    assert remove_states(run, RunHistory.of(entries(small_run)), "winner") == 150
    assert not (run.root / ".removed").exists()


def test_a_process_that_lost_the_lock_removes_nothing(run, small_run):
    before = states(run)
    with run.locked():
        (run.root / "run.lock").unlink()
        with pytest.raises(RunBusyError):
            remove_states(run, RunHistory.of(entries(small_run)), "winner")
    assert states(run) == before


def test_links_out_of_the_run_are_not_followed(run, small_run, tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("stays")
    (run.root / "jobs" / "a" / "link").symlink_to(outside)
    remove_states(run, RunHistory.of(entries(small_run)), "winner")
    assert (outside / "precious").read_text() == "stays"
