"""``alto list``, the default of the latest run, ``python -m alto`` and shell completion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from forks import run_code
from run_folders import write_journal, write_queue, write_run
from tiny import make_task
from typer.testing import CliRunner, Result

import alto
from alto.cli import app
from alto.engine import Engine
from alto.errors import RunNotFoundError
from alto.runs import RunDir

Events = list[dict[str, Any]]
START = 1_763_635_000.0


def invoke(*words: object, env: Mapping[str, str] | None = None) -> Result:
    return CliRunner(env=env).invoke(app, [*map(str, words)])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's current directory, without runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def runs(folder: Path, small_run: Events) -> Path:
    """A queue, a finished run, an interrupted one and a damaged one, oldest first."""
    write_queue(folder / "runs", {"a": make_task(folder, name="a")}, start=START)
    write_run(folder / "runs", "maths-1", small_run, start=START + 100)
    write_run(folder / "runs", "maths-2", small_run[:13], start=START + 200)
    damaged = write_run(folder / "runs", "maths-3", small_run, start=START + 300)
    (damaged / "task.yaml").unlink()
    return folder / "runs"


def test_runs_are_listed_newest_first(runs: Path) -> None:
    with RunDir(runs / "maths-2").locked():
        listed = invoke("list", env={"COLUMNS": "100"})
    assert listed.exit_code == 0, listed.output
    headings, _, *rows = [line.split() for line in listed.stdout.splitlines()]
    assert headings == ["run", "state", "task", "jobs", "best", "val", "done", "age"]
    assert [row[:2] for row in rows[:3]] == [["maths-3", "damaged"], ["maths-2", "running"], ["maths-1", "finished"]]
    assert rows[1][2:7] == ["maths", "4", "2.2000", "13.6", "%"]
    assert rows[2][2:7] == ["maths", "4", "1.9000", "100", "%"]
    assert rows[3][0].startswith("queue-")
    assert rows[3][1:7] == ["interrupted", "1", "task", "–", "–", "0"]
    assert "maths-3: expected the task of the run at" in listed.stdout
    assert listed.stderr == ""


def test_the_list_is_json_for_scripts(runs: Path) -> None:
    facts = json.loads(invoke("list", "--json").stdout)
    assert facts["dir"] == "runs"
    *of_runs, queue = facts["runs"]
    assert [run["state"] for run in of_runs] == ["damaged", "interrupted", "finished"]
    assert (queue["kind"], queue["tasks"], queue["started_at"]) == ("queue", ["a"], START)
    finished = of_runs[2]
    assert (finished["dir"], finished["kind"], finished["tasks"]) == ("runs/maths-1", "run", ["maths"])
    assert (finished["num_jobs"], finished["best_validation_loss"], finished["done"]) == (4, 1.9, 1.0)
    assert finished["age_s"] > 0
    assert finished["problem"] is None
    named = json.loads(invoke("list", "--output-dir", "runs", "--json").stdout)
    assert [run["name"] for run in named["runs"]] == [run["name"] for run in facts["runs"]]


@pytest.mark.parametrize("columns", ["30", "80"])
def test_names_of_runs_are_never_cut(columns: str, folder: Path, small_run: Events) -> None:
    name = "a-long-name-of-a-task-20261123-112102"
    write_run(folder / "runs", name, small_run, start=START)
    assert name in invoke("list", env={"COLUMNS": columns}).stdout


def test_where_there_are_no_runs_the_list_says_how_to_begin_one(folder: Path) -> None:
    listed = invoke("list")
    assert (listed.exit_code, listed.stdout) == (
        0,
        f"no runs in {folder.resolve() / 'runs'}; begin one with: alto tune FILE\n",
    )
    assert json.loads(invoke("list", "--json").stdout)["runs"] == []
    absent = invoke("list", "--output-dir", "elsewhere")
    assert isinstance(absent.exception, RunNotFoundError)
    assert "--output-dir: expected a folder of runs, found none at elsewhere" in str(absent.exception)
    assert invoke("list", "runs/queue-1", "--output-dir", "runs").exit_code == 2


def test_the_tasks_of_a_queue_are_still_listed(runs: Path) -> None:
    queue = next(runs.glob("queue-*"))
    assert [task["task"] for task in json.loads(invoke("list", queue, "--json").stdout)["tasks"]] == ["a"]


@pytest.mark.parametrize("command", ["show", "report"])
def test_the_latest_run_is_shown_where_none_is_named(command: str, folder: Path, small_run: Events) -> None:
    for name, start in (("old", 0.0), ("new", 200.0), ("other", 100.0)):
        small_run[0]["task"] = name
        write_run(folder / "runs", name, small_run, start=START + start)
    shown = invoke(command)
    assert shown.exit_code == 0, shown.output
    assert shown.stderr == "latest run: runs/new\n"
    assert shown.stdout.startswith("new finished after")
    assert "latest" not in invoke(command, "runs/old").stderr


def test_the_latest_of_all_may_be_a_queue(folder: Path, small_run: Events) -> None:
    write_run(folder / "runs", "run", small_run, start=START)
    queue = write_queue(folder / "runs", {"a": make_task(folder, name="a")}, start=START + 100)
    shown = invoke("show", "--json")
    assert shown.stderr == f"latest run: runs/{queue.root.name}\n"
    assert [task["task"] for task in json.loads(shown.stdout)["tasks"]] == ["a"]


def test_the_latest_run_is_evaluated_where_no_adapter_is_named(
    folder: Path, small_run: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later queue has no adapter of its own."""
    calls: list[Any] = []

    def evaluate(engine: Engine, targets: Any, **settings: Any) -> None:
        calls.append(targets)
        raise RunNotFoundError("far enough")

    monkeypatch.setattr(Engine, "evaluate", evaluate)
    write_run(folder / "runs", "old", small_run, start=START)
    write_run(folder / "runs", "new", small_run, start=START + 100)
    write_queue(folder / "runs", {"a": make_task(folder, name="a")}, start=START + 200)
    assert invoke("eval").stderr == "latest run: runs/new\nloading the base model and the rows\n"
    assert invoke("eval", "runs/old").stderr == "loading the base model and the rows\n"
    assert calls == [[Path("runs/new")], [Path("runs/old")]]


def test_the_latest_interrupted_run_is_resumed_where_none_is_named(
    folder: Path, small_run: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def resume(engine: Engine, run: Path, **settings: Any) -> None:
        calls.append(run)
        raise RunNotFoundError("far enough")

    monkeypatch.setattr(Engine, "resume", resume)
    for index, events in enumerate((small_run[:5], small_run[:13], small_run, small_run[:13])):
        write_run(folder / "runs", f"run-{index}", events, start=START + index)
    with RunDir(folder / "runs" / "run-3").locked():
        assert invoke("resume", "--quiet").stderr == "latest interrupted run: runs/run-1\n"
    assert calls == [Path("runs/run-1")]


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        ("show", "has no run; name one (alto show RUN), or begin one with: alto tune FILE"),
        ("report", "has no run; name one (alto report RUN), or begin one with: alto tune FILE"),
        ("eval", "has no run; name one (alto eval RUN), or begin one with: alto tune FILE"),
        ("resume", "has no interrupted run; name one (alto resume RUN), or begin one with: alto tune FILE"),
    ],
)
@pytest.mark.parametrize("has_folder", [True, False])
def test_where_there_is_none_an_error_says_what_to_do(
    command: str, remedy: str, has_folder: bool, folder: Path, small_run: Events
) -> None:
    if has_folder:
        (folder / "runs").mkdir()
    if has_folder and command == "resume":
        write_run(folder / "runs", "done", small_run, start=START)
    result = invoke(command)
    assert isinstance(result.exception, RunNotFoundError)
    assert str(result.exception) == (
        f"expected a run, found that none is named and that {folder.resolve() / 'runs'} {remedy}"
    )


@pytest.mark.parametrize("command", ["show", "report", "list"])
def test_the_command_that_resumes_is_whole_on_a_narrow_terminal(command: str, folder: Path, small_run: Events) -> None:
    """The command is quoted, on one line, so that it can be copied."""
    if command == "list":
        root = write_queue(folder / "my runs", {"a": make_task(folder, name="a")}, start=START).root
    else:
        root = write_run(folder / "my runs", "a-run-with-a-rather-long-name", small_run[:13], start=START)
    shown = invoke(command, root, env={"COLUMNS": "40"})
    assert f"no process works on it; continue with: alto resume '{root}'\n" in shown.stdout


def test_alto_is_a_module_that_can_be_run() -> None:
    done = subprocess.run([sys.executable, "-m", "alto", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"alto {alto.__version__}\n"


def python_m_alto(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    code = f"import runpy, sys; sys.argv[1:] = {words!r}; runpy.run_module('alto', run_name='__main__', alter_sys=True)"
    return run_code(code, cwd=cwd, env=os.environ | environment)


def test_a_wrong_call_says_how_the_module_is_called(tmp_path: Path) -> None:
    wrong = python_m_alto("tune", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "Usage: alto tune" in wrong.stderr


def completed(words: str, cwd: Path) -> list[str]:
    """Return bash's completions of the last of ``words``."""
    typed = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    done = python_m_alto(cwd=cwd, _ALTO_COMPLETE="complete_bash", **typed)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_runs_and_keys_are_completed(runs: Path) -> None:
    (queue,) = (f"runs/{path.name}" for path in runs.glob("queue-*"))
    newest_first = ["runs/maths-3", "runs/maths-2", "runs/maths-1", queue]
    assert completed("alto show ru", runs.parent) == newest_first
    assert completed(f"alto eval {runs}/m", runs.parent) == [f"{runs}/maths-{number}" for number in (3, 2, 1)]
    assert completed("alto cancel runs/", runs.parent) == [queue]
    assert completed("alto tune task.yaml --set lea", runs.parent) == ["learning_rate="]
    assert completed("alto tune task.yaml --set early_exit.pol", runs.parent) == ["early_exit.policy="]
    assert completed("alto job clone runs/maths-2 job-000 --set label_s", runs.parent) == ["label_smoothing="]
    assert completed("alto simulate a.yaml --set gpus_", runs.parent) == ["gpus_per_node="]


def test_completion_can_be_installed(tmp_path: Path) -> None:
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "HOME": str(tmp_path)}
    done = python_m_alto("--install-completion", "bash", cwd=tmp_path, **named)
    assert done.returncode == 0, done.stderr
    script = (tmp_path / ".bash_completions" / "alto.sh").read_text(encoding="utf-8")
    assert "_ALTO_COMPLETE=complete_bash" in script
    assert script.rstrip().endswith(" alto")


def test_a_task_of_a_queue_that_runs_shows_how_long_it_takes(
    folder: Path, small_run: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = write_queue(folder / "runs", {name: make_task(folder, name=name) for name in ("a", "b")}, start=START)
    started = {"seq": 1, "time": START, "event": "executor_started", "task": "a", "attempt": 1, "gpus": [["n", 0]]}
    with queue.run.journal_file.open("a", encoding="utf-8") as journal:
        journal.write(json.dumps(started) + "\n")
    small_run[0]["data"] = {"train_rows": 500, "train_tokens": 10_000}
    write_journal(queue.run_of("a").journal_file, small_run[:13], start=START)
    monkeypatch.setattr("alto.cli.show.time.time", lambda: START + 12)
    with queue.run.locked():
        running, waiting = json.loads(invoke("show", queue.root, "--json").stdout)["tasks"]
    # 300 samples in 12 seconds, 1,900 left; a row has 20 tokens.
    assert (running["remaining_s"], running["tokens_per_s"]) == (pytest.approx(76.0), pytest.approx(500.0))
    assert (waiting["remaining_s"], waiting["tokens_per_s"]) == (None, None)


def test_a_folder_of_runs_in_the_place_of_a_queue_is_recognised(runs: Path) -> None:
    result = invoke("list", "runs")
    assert isinstance(result.exception, RunNotFoundError)
    assert str(result.exception).endswith("list its runs with: alto list --output-dir runs")
