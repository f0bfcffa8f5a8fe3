"""``alto prune``: deletes what old runs no longer need, and nothing that a run needs to continue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_folders import write_run
from typer.testing import CliRunner, Result

from alto.cli import app
from alto.errors import RunBusyError, RunError, RunNotFoundError
from alto.runs import RunDir

Events = list[dict[str, Any]]
START = 1_763_635_000.0


def invoke(*words: object) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["prune", *map(str, words)])


def filled(folder: Path) -> Path:
    """Write ten bytes for each state of four jobs, and a best adapter."""
    for job in "abcd":
        for kind in ("best", "last"):
            RunDir(folder).job(job, kind).mkdir(parents=True)
            (RunDir(folder).job(job, kind) / "adapter_model.safetensors").write_bytes(b"x" * 10)
    (folder / "best").mkdir(exist_ok=True)
    return folder


@pytest.fixture
def run(tmp_path: Path, small_run: Events) -> Path:
    return filled(write_run(tmp_path, "one", small_run, start=START))


def states(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run / "jobs")) for path in run.glob("jobs/*/*"))


def test_finalists_stay_by_default_and_the_bytes_are_printed(run: Path) -> None:
    journal = (run / "journal.jsonl").read_bytes()
    result = invoke(run)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{run}: freed 50 bytes, kept the best adapters of b, c, d\n"
    assert states(run) == ["b/best", "c/best", "d/best"]
    assert (run / "best").is_dir()
    assert (run / "journal.jsonl").read_bytes() == journal


def test_several_runs_are_pruned_at_once_and_printed_as_json(run: Path, tmp_path: Path, small_run: Events) -> None:
    other = filled(write_run(tmp_path, "other", small_run, start=START))
    result = invoke(run, other, "--keep", "winner", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {
        "runs": [{"dir": str(path), "kept": ["d"], "freed_bytes": 70} for path in (run, other)],
        "freed_bytes": 140,
    }
    assert states(run) == states(other) == ["d/best"]
    again = json.loads(invoke(run, other, "--keep", "winner", "--json").stdout)
    assert again["freed_bytes"] == 0


def test_a_run_that_a_process_works_on_is_refused(run: Path) -> None:
    before = states(run)
    with RunDir(run).locked():
        refused = invoke(run).exception
    assert isinstance(refused, RunBusyError)
    assert states(run) == before


def test_nothing_is_removed_where_one_run_can_still_go_on(run: Path, tmp_path: Path, small_run: Events) -> None:
    unfinished = filled(write_run(tmp_path, "unfinished", small_run[:-1], start=START))
    refused = invoke(run, unfinished).exception
    assert isinstance(refused, RunError)
    assert "found an interrupted run" in str(refused)
    waiting = RunDir(run).control / "1.command.json"
    waiting.parent.mkdir()
    waiting.write_text(json.dumps({"action": "clone", "job": "a", "changes": {}, "warm": False, "id": "1"}))
    refused = invoke(run).exception
    assert isinstance(refused, RunError)
    assert "found a run to which a command adds jobs" in str(refused)
    assert len(states(run)) == len(states(unfinished)) == 8


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    assert isinstance(invoke(tmp_path / "none").exception, RunNotFoundError)
    assert invoke().exit_code == 2
    assert invoke(tmp_path, "--keep", "some").exit_code == 2
