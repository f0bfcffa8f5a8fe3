"""Folders of runs and queues of version 0.1 are shown, reported and resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from alto.cli import app
from alto.early_exit import audit
from alto.errors import NoResultError, RunNotFoundError
from alto.results import load_run
from alto.runs import TaskStage, read_entries, read_history, read_queue_history
from alto.runs.events import QueueStarted, TaskResumed, TaskStarted, UnknownEvent

MADE_BY_0_1 = Path(__file__).parent / "journals_0_1"
FOLDER = "/alto-0.1"
"""The name in its files of the folder in which they were made."""

JOURNALS = sorted(path.relative_to(MADE_BY_0_1).as_posix() for path in MADE_BY_0_1.rglob("journal.jsonl"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """All of them, as if they had been made in this folder."""
    shutil.copytree(MADE_BY_0_1, tmp_path, dirs_exist_ok=True)
    for path in tmp_path.rglob("*"):
        if path.suffix in (".json", ".jsonl", ".yaml"):
            path.write_text(path.read_text("utf-8").replace(FOLDER, str(tmp_path)), encoding="utf-8")
    return tmp_path


def alto(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def facts(*arguments: object) -> Any:
    return json.loads(alto(*arguments))


def test_there_are_such_folders() -> None:
    assert len(JOURNALS) == 5
    for folder in ("finished", "interrupted", "queue"):
        sizes = [path.stat().st_size for path in (MADE_BY_0_1 / folder).rglob("*") if path.is_file()]
        assert sum(sizes) < 100_000


@pytest.mark.parametrize("journal", JOURNALS)
def test_every_event_is_known_and_every_exit_derived_again(journal: str) -> None:
    entries = read_entries(MADE_BY_0_1 / journal)
    assert not any(isinstance(entry.event, UnknownEvent) or entry.unknown for entry in entries)
    assert isinstance(entries[0].event, TaskStarted | QueueStarted)
    assert entries[0].event.format == 1
    if isinstance(entries[0].event, TaskStarted):
        assert entries[0].event.base is None
        assert audit(entries) == ()


def test_a_finished_run_is_shown_and_reported(folder: Path) -> None:
    run = folder / "finished"
    shown = facts("show", run, "--json")
    assert (shown["state"], shown["metric"], len(shown["jobs"])) == ("finished", "reward_accuracy", 4)
    assert {job["exit_reason"] for job in shown["jobs"]} == {None, "underperforming"}
    assert f"{shown['best_job']} with validation loss {shown['best_validation_loss']:.4f}" in alto("show", run)
    alto("report", run)
    page = (run / "report.html").read_text("utf-8")
    assert all(job["job"] in page for job in shown["jobs"])
    assert facts("resume", run, "--json")["best_job"] == shown["best_job"]


def test_an_interrupted_run_is_shown_reported_and_resumed(folder: Path) -> None:
    run = folder / "interrupted"
    before = facts("show", run, "--json")
    assert (before["state"], before["best_job"] in {job["job"] for job in before["jobs"]}) == ("interrupted", True)
    alto("report", run)
    result = facts("resume", run, "--json")
    after = read_history(run)
    (resumed,) = [entry.event for entry in read_entries(run / "journal.jsonl") if isinstance(entry.event, TaskResumed)]
    assert resumed.notes[-1].startswith("The journal of the run does not record its base model")
    assert resumed.base is not None
    assert after.result is not None
    assert after.result.best_job == result["best_job"]
    steps = {job["job"]: job["step"] for job in before["jobs"]}
    assert all(job.step >= steps[job.job] > 0 for job in after.jobs.values())
    assert any(job.step > steps[job.job] for job in after.jobs.values())
    assert audit(read_entries(run / "journal.jsonl")) == ()
    assert (run / "best" / "adapter_model.safetensors").is_file()


def test_a_queue_is_shown_reported_and_resumed(folder: Path) -> None:
    queue = folder / "queue"
    shown = facts("show", queue, "--json")
    assert shown["state"] == "interrupted"
    assert [(task["task"], task["state"]) for task in shown["tasks"]] == [("first", "finished"), ("second", "waiting")]
    alto("report", queue)
    assert "second" in (queue / "report.html").read_text("utf-8")
    alto("resume", queue)
    history = read_queue_history(queue)
    assert history.is_completed
    assert {name: task.state for name, task in history.tasks.items()} == dict.fromkeys(
        ("first", "second"), TaskStage.FINISHED
    )
    assert [attempt.outcome for attempt in history.tasks["second"].attempts] == ["interrupted", "finished"]
    assert (queue / "tasks" / "second" / "best" / "adapter_model.safetensors").is_file()


def test_the_results_of_a_finished_run_are_tables_and_those_of_an_interrupted_one_are_refused(folder: Path) -> None:
    pytest.importorskip("pandas", reason="tables need the extra 'data'")
    result = load_run(folder / "finished")
    assert result.jobs.index[0] == result.best_job
    assert len(result.jobs) == len(result.job_results) == 4
    assert set(result.curves["job"]) == set(result.jobs.index)
    assert result.training_losses.shape[1] == 4
    assert result.configurations.empty
    assert result.lead is None
    assert result.best_job in result._repr_html_()
    assert result.compare(result).same_data
    with pytest.raises(NoResultError, match="alto resume"):
        load_run(folder / "interrupted")
    with pytest.raises(RunNotFoundError):
        load_run(next((folder / "queue").rglob("journal.jsonl")).parent / "nothing")
