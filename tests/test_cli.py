"""The command line: what goes to stdout, what to stderr, and the exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import make_task, read_journal, save_model
from typer.testing import CliRunner, Result

import alto
from alto.cli import app, main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


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
    "arguments", [["tune"], ["tune", "a.yaml", "b.yaml"], ["tune", "a.yaml", "--speed", "9"], ["tune-all"], ["report"]]
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
    """As a script calls it: result on stdout, and on stderr nothing but errors."""
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
