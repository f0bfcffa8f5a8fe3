"""The command line: stdout, stderr and the exit code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import make_task, read_journal
from typer.main import get_command
from typer.testing import CliRunner, Result

import alto
from alto.cli import app, main


@pytest.fixture
def task_file(model: Path, tmp_path: Path) -> Path:
    task = make_task(tmp_path, model=str(model), max_steps=4, search_space={"lr": [1e-3, 1e-2], "r": [2, 4]})
    path = tmp_path / "task.yaml"
    path.write_text(task.to_yaml(), encoding="utf-8")
    return path


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run_of(output_dir: Path) -> Path:
    (root,) = output_dir.iterdir()
    return root


@pytest.mark.parametrize("action", ["stop", "resume", "clone"])
def test_the_help_of_a_job_command_names_the_key_that_a_finished_run_needs(action: str) -> None:
    """A finished run without ``keep: all`` has no states to continue from: ``runs.check_can_continue``."""
    shown = " ".join(invoke("job", action, "--help").stdout.split())
    assert "keep: all" in shown


def test_the_help_lists_every_command_in_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = invoke("--help").stdout
    first, *groups = re.split(r"─ (A task|Runs and their adapters|Many tasks) ─", shown)
    assert groups[::2] == ["A task", "Runs and their adapters", "Many tasks"]
    assert "Commands" not in first
    listed = [name for group in groups[1::2] for name in re.findall(r"^│ (\w+) ", group, re.MULTILINE)]
    names = [*get_command(app).commands]
    assert sorted(listed) == sorted(names)
    assert listed[:4] == ["demo", "doctor", "init", "tune"]


@pytest.mark.parametrize("test_split", [0.25, None])
def test_tune_of_a_classifier_with_test_rows_ends_with_the_command_that_measures_labels(
    test_split: float | None, tmp_path: Path
) -> None:
    rows = [{"text": f"Film {n} was {name}.", "label": name} for n in range(12) for name in ("dull", "warm")]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    keys = {"model": "alto-tiny", "dataset": str(file), "method": "classification", "validation_split": 0.25}
    task = tmp_path / "task.yaml"
    task.write_text(json.dumps({**keys, "test_split": test_split, "max_steps": 2}), encoding="utf-8")
    done = invoke("tune", task, "--output-dir", tmp_path / "runs")
    assert done.exit_code == 0, done.output
    command = f"next:    alto eval {run_of(tmp_path / 'runs')}"
    assert [line.startswith(command) for line in done.stdout.splitlines()[-1:]] == [test_split is not None]


def test_tune_tells_what_happens_in_plain_lines(task_file: Path, tmp_path: Path) -> None:
    done = invoke("tune", task_file, "--output-dir", tmp_path / "runs")
    assert done.exit_code == 0, done.output
    root = run_of(tmp_path / "runs")
    best = read_journal(root)[-1]["best_job"]
    assert f"report:  {root / 'report.html'}\n" in done.stdout
    assert "tiny finished after" in done.stdout
    assert f"★ {best}" in done.stdout
    assert all(f"job-{index:03d}" in done.stdout for index in range(4))
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


def test_json_is_strict_json_and_nothing_else(task_file: Path, tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    rates = "search_space.lr=[1e-3, 1e30]"
    done = invoke("tune", task_file, "-o", tmp_path / "runs", "--json", "--set", rates, "--set", "max_grad_norm=0")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout, parse_constant=refuse)
    assert result["run_dir"] == str(run_of(tmp_path / "runs"))
    assert result["adapter_dir"] == str(run_of(tmp_path / "runs") / "best")
    assert len(result["jobs"]) == 4
    assert [job["best_validation_loss"] for job in result["jobs"] if job["exit_reason"] == "diverging"]
    assert result["best_job"] in {job["job"] for job in result["jobs"]}
    assert 0 < result["samples_saved"] < 1


def test_the_strategy_is_the_engines(task_file: Path, tmp_path: Path) -> None:
    two_slots = ("--set", "num_gpus=2")
    done = invoke("tune", task_file, "-o", tmp_path / "runs", "--quiet", *two_slots, "--strategy", "single")
    assert done.exit_code == 0, done.output
    root = run_of(tmp_path / "runs")
    assert not (root / "logs").exists(), "one process"
    for command in (("tune", task_file), ("run", task_file), ("plan", task_file), ("resume", root)):
        refused = invoke(*command, "--strategy", "magic")
        assert "strategy: expected one of adapter_parallel, single, found 'magic'" in str(refused.exception)


def test_quiet_prints_the_adapter_folder_only(task_file: Path, tmp_path: Path) -> None:
    done = invoke("tune", task_file, "-o", tmp_path / "runs", "--quiet")
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{run_of(tmp_path / 'runs') / 'best'}\n"
    assert (Path(done.stdout.strip()) / "adapter_model.safetensors").is_file()


def test_set_overrides_the_file(task_file: Path, tmp_path: Path) -> None:
    overrides = ("--set", "search_space.lr=[1e-4]", "--set", "early_exit.policy=paper", "--set", "name=other")
    done = invoke("tune", task_file, "-o", tmp_path / "runs", "-q", *overrides)
    assert done.exit_code == 0, done.output
    root = run_of(tmp_path / "runs")
    task = alto.load_task(root / "task.yaml")
    assert root.name.startswith("other-")
    assert {job.config.learning_rate for job in task.jobs} == {1e-4}
    assert task.early_exit.policy == "paper"


def test_report_shows_a_run_again(task_file: Path, tmp_path: Path) -> None:
    invoke("tune", task_file, "-o", tmp_path / "runs", "-q")
    root = run_of(tmp_path / "runs")
    (root / "report.html").unlink()
    done = invoke("report", root)
    assert done.exit_code == 0, done.output
    assert (root / "report.html").is_file()
    assert f"report:  {root / 'report.html'}\n" in done.stdout
    assert all(f"job-{index:03d}" in done.stdout for index in range(4))
    for job, found in (("job-999", "expected a job of this run"), ("job-001", "expected a run that is not finished")):
        assert str(invoke("job", "stop", root, job).exception).startswith(found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "absent.yaml"], "absent.yaml"),
        (["tune", "task.yaml", "--set", "learning_rte=1"], "learning_rate"),
        (["tune", "task.yaml", "--set", "dataset=absent.jsonl"], "DataFileNotFoundError: dataset: expected a file"),
        (["report", "absent"], "absent"),
    ],
)
def test_an_error_is_one_message_on_stderr(
    task_file: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(task_file.parent)
    monkeypatch.setattr(sys, "argv", ["alto", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    out, err = capfd.readouterr()
    assert exit_.value.code == 1
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert err.count("Error: ") == 1
    assert err.count("\n") == 1
    assert not (task_file.parent / "runs").exists()


@pytest.mark.parametrize(
    "arguments", [["tune"], ["tune", "a.yaml", "b.yaml"], ["tune", "a.yaml", "--speed", "9"], ["tune-all"], ["preview"]]
)
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert "Usage" in done.stderr
    assert done.stdout == ""


def test_version() -> None:
    done = invoke("--version")
    assert (done.exit_code, done.stdout) == (0, f"alto {alto.__version__}\n")


def test_installed_program_keeps_streams_apart(task_file: Path, tmp_path: Path) -> None:
    """A script finds the result on stdout, and only errors on stderr."""
    program = Path(sys.executable).with_name("alto")
    command = [program, "tune", task_file, "-o", tmp_path / "runs", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["task"] == "tiny"
    assert done.stderr == ""
    failed = subprocess.run([*command, "--set", "dataset=absent.jsonl"], capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert failed.stderr.startswith("DataFileNotFoundError: ")
    assert "Traceback" not in failed.stderr


@pytest.fixture
def interrupted(task_file: Path, tmp_path: Path) -> Path:
    """A run stopped cleanly in the middle."""
    calls = iter(range(2))
    engine = alto.Engine(output_dir=tmp_path / "runs", is_interrupted=lambda: next(calls, None) is None)
    with pytest.raises(alto.AltoError, match="alto resume"):
        engine.tune(alto.load_task(task_file, ["early_exit=false"]))
    return run_of(tmp_path / "runs")


def test_resume_goes_on_and_tells_only_what_is_new(interrupted: Path) -> None:
    done = invoke("resume", interrupted)
    assert done.exit_code == 0, done.output
    assert "resumed: 0 of 4 jobs have ended" in done.stdout
    assert "task tiny: 4 jobs" not in done.stdout
    assert read_journal(interrupted)[-1]["event"] == "task_completed"
    again = invoke("resume", interrupted, "--quiet")
    assert (again.exit_code, again.stdout) == (0, f"{interrupted / 'best'}\n")


def test_show_tells_a_run_without_touching_it(interrupted: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in interrupted.rglob("*") if path.name != "run.lock"}
    shown = invoke("show", interrupted)
    assert shown.exit_code == 0, shown.output
    assert all(f"job-{index:03d}" in shown.stdout for index in range(4))
    facts = json.loads(invoke("show", interrupted, "--json").stdout)
    assert facts["state"] == "interrupted"
    assert [job["job"] for job in facts["jobs"]] == [f"job-{index:03d}" for index in range(4)]
    assert facts["samples_budgeted"] > facts["samples_trained"] > 0
    watched = invoke("show", interrupted, "--watch")
    assert watched.stdout.count("job-000") == shown.stdout.count("job-000")
    assert before == {path: path.stat().st_mtime_ns for path in interrupted.rglob("*") if path.name != "run.lock"}


def test_a_file_gets_all_columns_of_the_table(interrupted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert "hidden columns" not in invoke("show", interrupted).stdout
    monkeypatch.setenv("COLUMNS", "50")
    assert "hidden columns" in invoke("show", interrupted).stdout


def test_lines_in_a_file_have_no_spaces_at_their_ends(
    small_run: list[dict[str, Any]],
    write_run: Callable[[list[dict[str, Any]]], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    run = write_run(small_run)
    (run / "task.yaml").write_text("", encoding="utf-8")
    shown = invoke("show", run).stdout
    assert "rank 3 of 3" in shown, "explanations of different lengths"
    assert not [line for line in shown.splitlines() if line.endswith(" ")]


def test_show_tells_what_was_measured_beside_the_loss(
    preference_run: list[dict[str, Any]], write_run: Callable[[list[dict[str, Any]]], Path]
) -> None:
    run = write_run(preference_run)
    (run / "task.yaml").write_text("", encoding="utf-8")
    facts = json.loads(invoke("show", run, "--json").stdout)
    assert (facts["metric"], facts["best_job"], facts["best_metrics"]["reward_accuracy"]) == (
        "reward_accuracy",
        "c",
        0.75,
    )
    assert [job["best_metrics"]["reward_accuracy"] for job in facts["jobs"]] == [0.61, 0.75, 0.75]
    assert [job["metrics"]["reward_accuracy"] for job in facts["jobs"]] == [0.61, 0.7, None]


def test_commands_to_an_interrupted_run_are_carried_out_when_it_goes_on(interrupted: Path) -> None:
    result = invoke("job", "clone", interrupted, "job-000", "--set", "lr=5e-4", "--warm")
    assert result.exit_code == 0, result.output
    assert f"alto resume {interrupted}" in result.stdout.replace("\n", " ")
    assert invoke("job", "stop", interrupted, "job-001").exit_code == 0
    assert invoke("resume", interrupted, "--quiet").exit_code == 0
    events = read_journal(interrupted)
    (added,) = [event for event in events if event["event"] == "job_added"]
    assert (added["job"], added["origin"], added["config"]["learning_rate"]) == ("job-004", "job-000", 5e-4)
    assert [event["job"] for event in events if event.get("reason") == "stopped"] == ["job-001"]
    facts = json.loads(invoke("show", interrupted, "--json").stdout)
    assert [job["stage"] for job in facts["jobs"]] == ["completed", "exited", "completed", "completed", "completed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("job", "stop", "{run}", "job-009"), "expected a job of this run, found 'job-009'; it has job-000, job-001"),
        (("job", "clone", "{run}", "job-000", "--set", "lr"), "An override should be key=value"),
        (("job", "stop", "{tmp}", "job-000"), "found none of its files"),
        (("show", "{tmp}"), "found none of its files"),
        (("resume", "{tmp}"), "found none of its files"),
    ],
)
def test_wrong_runs_and_jobs_are_named(
    arguments: tuple[str, ...],
    message: str,
    interrupted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {"run": interrupted, "tmp": tmp_path}
    monkeypatch.setattr(sys, "argv", ["alto", *(argument.format(**names) for argument in arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert message in capsys.readouterr().err
    assert not (interrupted / "control").exists()


def test_reading_a_run_does_not_load_torch(interrupted: Path) -> None:
    code = (
        "import sys; from alto.cli import app; from typer.testing import CliRunner;"
        f"done = CliRunner().invoke(app, ['show', {str(interrupted)!r}]); assert done.exit_code == 0, done.output;"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_run_outlives_the_pipe_it_is_read_from(task_file: Path, tmp_path: Path) -> None:
    alto_tune = f"{sys.executable} -c 'from alto.cli import main; main()' tune {task_file}"
    command = f"{alto_tune} -o {tmp_path / 'runs'} | head -n 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert done.stdout, "the reader got its line"
    assert "Traceback" not in done.stderr
    assert read_journal(run_of(tmp_path / "runs"))[-1]["event"] == "task_completed"
    assert (run_of(tmp_path / "runs") / "best").is_dir()
