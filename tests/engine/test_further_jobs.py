"""A finished run with further jobs: they are trained, and its result, report and best adapter are updated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from journals import entries
from tiny import curves_of, make_task, read_journal, save_model
from typer.testing import CliRunner

import alto
from alto.artifacts import is_outdated
from alto.cli import app
from alto.early_exit import audit, selection_of
from alto.errors import JobCommandError, RunError, TaskInterruptedError
from alto.lora import read_adapter
from alto.runs import JobAction, Mailbox, RunDir, read_history

SPACE: dict[str, Any] = {"lr": [1e-4, 1e-3], "batch_size": [8]}
CHANGES: dict[str, Any] = {"learning_rate": 1e-2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, ``base``, and a finished run on it, ``finished``."""
    folder = tmp_path_factory.mktemp("further")
    save_model(folder / "base")
    alto.Engine(output_dir=folder / "runs").tune(task_in(folder))
    next((folder / "runs").iterdir()).rename(folder / "finished")
    return folder


def task_in(folder: Path, **settings: Any) -> alto.Task:
    keys = {
        "model": str(folder / "base"),
        "search_space": SPACE,
        "early_exit": False,
        "keep": "all",
        "report_to": "none",
        "num_train_epochs": 3,
        "eval_steps": 0.2,
        "max_slots": 1,  # each job trains alone, so that its bits do not depend on the others
    }
    return make_task(folder, **(keys | settings))


@pytest.fixture
def finished(folder: Path, tmp_path: Path) -> RunDir:
    return RunDir.open(shutil.copytree(folder / "finished", tmp_path / "run"))


def same_bits(one: Path, other: Path) -> bool:
    ours, theirs = read_adapter(one), read_adapter(other)
    return all(ours[name][0].equal(a) and ours[name][1].equal(b) for name, (a, b) in theirs.items())


@pytest.mark.parametrize("warm", [False, True])
def test_a_clone_is_trained_as_it_would_have_been_before_the_end(
    warm: bool, finished: RunDir, folder: Path, tmp_path: Path
) -> None:
    before = alto.load_run(finished.root)
    command = Mailbox(finished).send(JobAction.CLONE, before.best_job, changes=CHANGES, warm=warm)
    result = alto.Engine().resume(finished.root)
    answer = Mailbox(finished).wait_for_answer(command, 0)
    assert answer is not None
    assert answer.done

    other = tmp_path / "other"

    def clone_late() -> bool:
        """Send the command in the last steps of the run; called before every step."""
        [run] = other.iterdir()
        jobs, mailbox = read_history(run).jobs, Mailbox(RunDir(run))
        is_late = jobs["job-001"].step >= jobs["job-001"].total_steps - 1
        if is_late and "job-002" not in jobs and not mailbox.num_pending:
            mailbox.send(JobAction.CLONE, before.best_job, changes=CHANGES)
        return False

    if not warm:
        alto.Engine(output_dir=other, is_interrupted=clone_late).tune(task_in(folder))
        [run] = other.iterdir()
        assert same_bits(finished.root / "jobs/job-002/last", run / "jobs/job-002/last")
        ours, theirs = (curves_of(read_journal(root))["job-002"] for root in (finished.root, run))
        assert (ours.train, ours.validation) == (theirs.train, theirs.validation)
    start = read_history(finished.root).jobs["job-002"].start
    assert (start is None) == warm

    assert (len(before.job_results), len(result.job_results)) == (2, 3)
    assert result.best_job == "job-002"
    assert result.best_validation_loss < before.best_validation_loss
    metrics = json.loads((finished.best / "metrics.json").read_text())
    assert (metrics["job"], metrics["num_jobs"]) == ("job-002", 3)
    assert same_bits(finished.best, finished.job("job-002", "best"))
    assert "job-002" in finished.report_file.read_text()


def test_the_journal_of_both_parts_is_one_run(finished: RunDir) -> None:
    before = read_journal(finished.root)
    Mailbox(finished).send(JobAction.CLONE, "job-001", changes=CHANGES)
    seen: list[Any] = []
    alto.Engine(observers=[seen.append]).resume(finished.root)
    events = read_journal(finished.root)
    assert events[: len(before)] == before, "the finished run's journal was cut"
    names = [event["event"] for event in events[len(before) :]]
    assert names[0] == "task_resumed"
    note = events[len(before)]["notes"][0]
    assert "will be" not in note, "the note stays with the run when it has ended again"
    assert note.startswith("The run was finished and then continued by a command")
    assert "job_added" in names
    assert names[-1] == "task_completed"
    assert [entry.is_replayed for entry in seen] == [True] * len(before) + [False] * (len(events) - len(before))
    assert audit(entries(events)) == ()
    assert selection_of(entries(events)).jobs == ("job-000", "job-001", "job-002")
    untouched = [event for event in events[len(before) :] if event.get("job") in ("job-000", "job-001")]
    assert not [event for event in untouched if event["event"] in ("train", "eval", "job_admitted")]


def test_a_clone_that_is_worse_changes_no_winner(finished: RunDir) -> None:
    before = alto.load_run(finished.root)
    Mailbox(finished).send(JobAction.CLONE, "job-001", changes={"learning_rate": 1e-30})
    result = alto.Engine().resume(finished.root)
    assert (result.best_job, result.best_validation_loss) == (before.best_job, before.best_validation_loss)
    assert len(result.job_results) == 3
    assert not is_outdated(result.outcome)


def test_without_a_command_a_finished_run_stays_as_it_is(finished: RunDir) -> None:
    before = finished.journal_file.read_bytes()
    Mailbox(finished).send(JobAction.STOP, "job-001")
    alto.Engine().resume(finished.root)
    assert finished.journal_file.read_bytes() == before


def test_a_refused_command_renews_the_same_result(finished: RunDir) -> None:
    before = alto.load_run(finished.root)
    command = Mailbox(finished).send(JobAction.CLONE, "job-001")
    result = alto.Engine().resume(finished.root)
    answer = Mailbox(finished).wait_for_answer(command, 0)
    assert answer is not None
    assert "job-001 has it" in answer.message
    assert (result.best_job, len(result.job_results)) == (before.best_job, 2)


def test_it_can_be_interrupted_and_continues(finished: RunDir) -> None:
    Mailbox(finished).send(JobAction.CLONE, "job-001", changes=CHANGES)
    whole = shutil.copytree(finished.root, finished.root.with_name("whole"))
    calls = iter(range(3))
    with pytest.raises(TaskInterruptedError):
        alto.Engine(is_interrupted=lambda: next(calls, None) is None).resume(finished.root)
    assert read_history(finished.root).result is None, "a new result will follow"
    assert (finished.best / "metrics.json").is_file(), "the best adapter so far is kept until then"
    result, expected = alto.Engine().resume(finished.root), alto.Engine().resume(whole)
    assert result.best_validation_loss == expected.best_validation_loss
    assert same_bits(finished.best, whole / "best")


def test_a_best_adapter_of_the_result_before_is_replaced(finished: RunDir) -> None:
    """This is the state after a kill between the new result and its export."""
    old = shutil.copytree(finished.best, finished.root / "old")
    Mailbox(finished).send(JobAction.CLONE, "job-001", changes=CHANGES)
    alto.Engine().resume(finished.root)
    shutil.rmtree(finished.best)
    old.rename(finished.best)
    result = alto.Engine().resume(finished.root)
    assert json.loads((finished.best / "metrics.json").read_text())["job"] == result.best_job == "job-002"


def test_a_run_whose_states_are_gone_keeps_its_result(finished: RunDir) -> None:
    Mailbox(finished).send(JobAction.CLONE, "job-001", changes=CHANGES)
    shutil.rmtree(finished.job("job-000", "last"))
    before = finished.journal_file.read_bytes()
    with pytest.raises(JobCommandError, match=r"all 2 jobs, found that 1 are missing .* only to a run with keep: all"):
        alto.Engine().resume(finished.root)
    assert finished.journal_file.read_bytes() == before
    assert finished.job("job-001", "best").is_dir()


def test_a_run_whose_states_are_damaged_keeps_its_result(finished: RunDir) -> None:
    Mailbox(finished).send(JobAction.CLONE, "job-001", changes=CHANGES)
    (finished.job("job-000", "last") / "optimizer.safetensors").write_bytes(b"")
    before = finished.journal_file.read_bytes()
    with pytest.raises(RunError, match="found missing or changed states, so it cannot train further jobs"):
        alto.Engine().resume(finished.root)
    assert finished.journal_file.read_bytes() == before
    assert finished.job("job-001", "best").is_dir()


def test_the_command_line_says_how_it_takes_effect(finished: RunDir) -> None:
    run = CliRunner().invoke
    cloned = run(app, ["job", "clone", str(finished.root), "job-001", "--set", "lr=1e-2"])
    assert cloned.exit_code == 0, cloned.output
    assert f"the command takes effect with: alto resume {finished.root}" in cloned.output.replace("\n", "")
    stopped = run(app, ["job", "stop", str(finished.root), "job-001"])
    assert stopped.exit_code != 0
    resumed = run(app, ["resume", str(finished.root), "--json"])
    assert resumed.exit_code == 0, resumed.output
    assert json.loads(resumed.stdout)["best_job"] == "job-002"


def test_a_job_that_was_stopped_can_be_resumed_after_the_end(folder: Path, tmp_path: Path) -> None:
    def stop_early() -> bool:
        [run] = (tmp_path / "runs").iterdir()
        history = read_history(run) if (run / "journal.jsonl").stat().st_size else None
        job = history.jobs.get("job-000") if history is not None else None
        if job is not None and job.best_step and not job.has_ended and not Mailbox(RunDir(run)).num_pending:
            Mailbox(RunDir(run)).send(JobAction.STOP, "job-000")
        return False

    alto.Engine(output_dir=tmp_path / "runs", is_interrupted=stop_early).tune(task_in(folder))
    [root] = (tmp_path / "runs").iterdir()
    assert read_history(root).jobs["job-000"].exit_reason == "stopped"
    Mailbox(RunDir(root)).send(JobAction.RESUME, "job-000")
    alto.Engine().resume(root)
    assert read_history(root).jobs["job-000"].exit_reason is None
    assert same_bits(root / "jobs/job-000/last", folder / "finished/jobs/job-000/last")
