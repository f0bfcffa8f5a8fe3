"""Run directories: unique names, the resolved task inside; and what a finished run keeps of its jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from journals import entries

from alto.base import replace_file
from alto.errors import RunBusyError, RunError, RunExistsError
from alto.runs import QueueDir, RunDir, RunHistory, kept_jobs, remove_states, run_dir
from alto.spec import Task, load_task

TASK = Task(name="sums", model="alto-tiny", dataset="rows.jsonl", search_space={"lr": [1e-4, 1e-3]}, r=4)


def test_holds_the_resolved_task(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "new" / "runs", TASK)
    assert run.root.parent == tmp_path / "new" / "runs"
    assert run.root.name.startswith("sums-")
    assert load_task(run.task_file) == TASK
    assert {path.name for path in run.root.iterdir()} == {"task.yaml", "journal.jsonl"}


def test_names_of_its_files(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.journal_file == tmp_path / "journal.jsonl"
    assert run.best == tmp_path / "best"
    assert run.job("job-003", "last") == tmp_path / "jobs" / "job-003" / "last"


def test_root_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunDir.create("runs", TASK).root.is_absolute()


def test_runs_of_the_same_second_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alto.runs.run_dir.time.strftime", lambda _: "20260101-000000")
    names = [RunDir.create(tmp_path, TASK).root.name for _ in range(3)]
    assert names == ["sums-20260101-000000", "sums-20260101-000000-1", "sums-20260101-000000-2"]


def test_no_free_name_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alto.runs.run_dir.time.strftime", lambda _: "now")
    for attempt in range(1000):
        os.mkdir(tmp_path / ("sums-now" if attempt == 0 else f"sums-now-{attempt}"))
    with pytest.raises(RunExistsError, match=r"found sums-now and 999 others taken; remove old runs from"):
        RunDir.create(tmp_path, TASK)


def test_a_file_in_the_way_is_named_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way")
    with pytest.raises(RunError, match=r"found .*runs \(.*\); choose another with --output-dir"):
        RunDir.create(tmp_path / "runs", TASK)


@pytest.mark.parametrize("kind", ["run", "queue"])
def test_threads_of_one_process_do_not_share_a_folder(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alto.runs.run_dir.time.strftime", lambda _: "20260101-000000")
    together = threading.Barrier(2, timeout=10)
    claim = run_dir.claim

    def claim_together(*arguments: Any) -> Path:
        together.wait()  # both have created the folder that they will rename
        return claim(*arguments)

    def create(_: int) -> Path:
        return RunDir.create(tmp_path, TASK).root if kind == "run" else QueueDir.create(tmp_path, [], [], {}).root

    monkeypatch.setattr(run_dir, "claim", claim_together)
    with ThreadPoolExecutor(2) as threads:
        roots = list(threads.map(create, range(2)))
    assert sorted(tmp_path.iterdir()) == sorted(roots)


def test_threads_of_one_process_do_not_write_into_each_others_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(2, timeout=10)
    sync = os.fsync

    def sync_together(descriptor: int) -> None:
        together.wait()
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync_together)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda text: replace_file(tmp_path / "file", text), ["a" * 5, "b" * 9]))
    assert (tmp_path / "file").read_text(encoding="utf-8") in ("a" * 5, "b" * 9)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_process_left_of_a_file_is_removed_with_the_next_one(tmp_path: Path) -> None:
    code = f"""
import os, pathlib, signal
from alto.base import replace_file
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
replace_file(pathlib.Path({str(tmp_path / "file")!r}), "of the killed one")
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.read_text(encoding="utf-8") == "of the killed one"
    replace_file(tmp_path / "file", "of the next")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_another_process_writes_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, written = os.fsync, []

    def write_another(descriptor: int) -> None:
        sync(descriptor)
        if not written:
            written.append("inner")
            replace_file(tmp_path / "file", "of the second")

    monkeypatch.setattr(os, "fsync", write_another)
    replace_file(tmp_path / "file", "of the first")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "of the first"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.fixture
def run(write_run, small_run) -> RunDir:
    """A run in which ``a`` diverged, the only rung dropped ``b``, ``c`` overfitted after it, and ``d`` won."""
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
