"""What a run leaves on disk when it ends, and what needs more than that."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny import make_task, read_journal, save_model
from typer.testing import CliRunner

import alto
from alto.cli import app
from alto.errors import JobCommandError, RunNotFoundError
from alto.lora import read_adapter
from alto.runs import Action, Mailbox, RunDir, read_history


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = save_model(tmp_path_factory.mktemp("keep") / "base")
    return folder


def tuned(base: Path, folder: Path, **settings: Any) -> RunDir:
    """A finished run of four jobs: one diverges, one is dropped at each of two rungs, one does all its steps."""
    folder.mkdir(exist_ok=True)
    keys = {
        "model": str(base),
        "search_space": {"lr": [1e-4, 1e-3, 1e-2, 1e30], "batch_size": [8]},
        "early_exit": alto.EarlyExit(rungs=((0.2, 0.5), (0.6, 0.5))),
        "report_to": "none",
        "num_train_epochs": 3,
        "eval_steps": 0.2,
    }
    task = make_task(folder, **(keys | settings))
    return RunDir.open(alto.Engine(output_dir=folder / "runs").tune(task).run_dir)


def states(run: RunDir) -> dict[str, list[str]]:
    return {path.name: sorted(part.name for part in path.iterdir()) for path in sorted((run.root / "jobs").iterdir())}


def ends(run: RunDir) -> dict[str, str]:
    return {job.job: str(job.outcome) for job in read_history(run.root).jobs.values()}


def test_by_default_finalists_keep_their_best_adapters(base: Path, tmp_path: Path) -> None:
    run = tuned(base, tmp_path)
    assert ends(run) == {
        "job-000": "underperforming", "job-001": "underperforming", "job-002": "completed", "job-003": "diverging",
    }  # fmt: skip
    assert states(run) == {job: ["best"] for job in ("job-001", "job-002")}
    best = read_history(run.root).best
    assert best is not None
    kept, exported = read_adapter(run.job(best.job, "best")), read_adapter(run.best)
    assert all(kept[name][0].equal(a) and kept[name][1].equal(b) for name, (a, b) in exported.items())


def test_the_winner_alone_or_everything_can_be_kept(base: Path, tmp_path: Path) -> None:
    least, most = tuned(base, tmp_path / "a", keep="winner"), tuned(base, tmp_path / "b", keep="all")
    winner = read_journal(least.root)[-1]["best_job"]
    assert states(least) == {winner: ["best"]}
    whole = ["best", "last"]
    assert states(most) == {"job-000": whole, "job-001": whole, "job-002": whole, "job-003": ["last"]}


def test_a_removal_that_was_killed_is_completed_by_the_next_process(base: Path, tmp_path: Path) -> None:
    run = tuned(base, tmp_path)
    before, journal = states(run), run.journal_file.read_bytes()
    shutil.copytree(run.job("job-001", "best"), run.job("job-003", "best"))
    alto.Engine().resume(run.root)
    assert states(run) == before
    assert run.journal_file.read_bytes() == journal


def test_a_finished_run_from_before_there_was_such_a_key_keeps_what_it_has(base: Path, tmp_path: Path) -> None:
    run = tuned(base, tmp_path, keep="all")
    before = states(run)
    run.task_file.write_text(run.task_file.read_text().replace("keep: all\n", ""))
    alto.Engine().resume(run.root)
    assert states(run) == before


@pytest.mark.parametrize("action", [Action.RESUME, Action.CLONE])
def test_a_finished_run_that_has_not_kept_all_takes_no_further_jobs(action: Action, base: Path, tmp_path: Path) -> None:
    run = tuned(base, tmp_path)
    with pytest.raises(JobCommandError, match="only a run whose task has keep: all takes further jobs"):
        Mailbox(run).send(action, "job-000", warm=action is Action.CLONE)
    told = CliRunner().invoke(app, ["job", action.value, str(run.root), "job-000"])
    assert isinstance(told.exception, JobCommandError)
    assert "keep: all" in str(told.exception)
    assert not run.control.exists()
    before = run.journal_file.read_bytes()
    alto.Engine().resume(run.root)
    assert run.journal_file.read_bytes() == before


def test_all_jobs_are_evaluated_only_where_all_were_kept(base: Path, tmp_path: Path) -> None:
    run = tuned(base, tmp_path, keep="winner")
    engine = alto.Engine()
    needs = r"expected the best adapters of job-000.* were removed .*; a new run keeps them with keep: all"
    with pytest.raises(RunNotFoundError, match=needs):
        engine.evaluate(run.root, all_jobs=True)
    with pytest.raises(RunNotFoundError, match=needs):
        engine.evaluate(run.root, jobs=["job-000"])
    winner = read_journal(run.root)[-1]["best_job"]
    assert [found.name for found in engine.evaluate(run.root, jobs=[winner]).adapters] == [winner]


def test_the_journal_says_which_states_a_checkpoint_has(base: Path, tmp_path: Path) -> None:
    run = tuned(base, tmp_path)
    last = [json.loads(line) for line in run.journal_file.read_text().splitlines() if '"checkpoint"' in line][-1]
    assert {job: saved["is_resumable"] for job, saved in last["jobs"].items()} == dict.fromkeys(ends(run), False)
