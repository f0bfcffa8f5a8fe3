"""Commands on runs: invalid paths, jobs and changes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

TASK_STARTED = {
    "seq": 0,
    "time": 0.0,
    "event": "task_started",
    "task": "t",
    "jobs": [{"job": "job-000", "config": {}, "total_steps": 1, "samples_budgeted": 1}],
}


@pytest.fixture
def run(folder: Path) -> Path:
    root = folder / "run"
    root.mkdir()
    (root / "task.yaml").write_text((folder / "task.yaml").read_text())
    (root / "journal.jsonl").write_text(json.dumps(TASK_STARTED) + "\n")
    (root / "run.lock").touch()
    return root


@pytest.mark.parametrize("command", ["show", "report", "resume", "eval"])
@pytest.mark.parametrize(
    "path",
    [
        "",
        ".",
        "absent",
        "../../etc",
        "/dev/null",
        "task.yaml",
        "task.yaml/x",
        "loop",
        "x" * 300,
        "x/" * 300,
        "\x1b[31m",
    ],
)
def test_no_run(refusal: Any, folder: Path, command: str, path: str) -> None:
    (folder / "loop").symlink_to(folder / "loop")
    assert "RunNotFoundError: " in refusal(command, path)


@pytest.mark.parametrize("job", ["", "..", "../../etc", "job-000/../job-000", "\x1b[31mjob", "x" * 300, "job-0000"])
def test_no_job(refusal: Any, run: Path, job: str) -> None:
    for action in ("stop", "resume", "clone"):
        message = refusal("job", action, run, job)
        assert "JobCommandError: expected a job of this run, found '" in message
        assert "it has job-000" in message
    assert "RunNotFoundError: job: expected a job of" in refusal("eval", run, "--job", job)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lr=2024-01-01", "learning_rate (the peak learning rate) should be a finite number > 0, found datetime.date"),
        ("lr=.nan", "found nan"),
        ("lr=!!set {a}", "found {'a'} (set)"),
        ("lr=!!binary aGk=", "found b'hi' (bytes)"),
        ("lr=[1]", "found [1] (list)"),
        ("lr=0x" + "f" * 5000, "found a number of 20000 bits"),
        ("lerning_rate=1", "unknown key 'lerning_rate'. Did you mean 'learning_rate'?"),
        ("a.b=1", "unknown key 'a.b'"),
        ("name=x", "unknown key 'name'"),
        ("lr", "should be key=value, found 'lr'"),
    ],
)
def test_no_change_of_a_clone(refusal: Any, run: Path, change: str, message: str) -> None:
    assert message in refusal("job", "clone", run, "job-000", "--set", change)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--limit", "0"], "limit: expected at least 1, found 0"),
        (["--batch-size", "-1"], "batch_size: expected at least 1, found -1"),
        (["--save-predictions", "x" * 300], "File name too long"),
    ],
)
def test_no_evaluation(refusal: Any, run: Path, options: list[str], message: str) -> None:
    assert message in refusal("eval", run, *options)


@pytest.mark.parametrize("command", ["show", "report"])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"seq": 0, "time": 1e18, "event": "task_started"}, "line 1 of 2 is not one"),
        ({"seq": 0, "time": float("nan"), "event": "task_started"}, "line 1 of 2 is not one"),
    ],
)
def test_a_time_that_no_calendar_has(
    refusal: Any, run: Path, command: str, line: dict[str, object], message: str
) -> None:
    (run / "journal.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps(TASK_STARTED)}\n")
    assert message in refusal(command, run)


def test_a_pipe_for_a_journal_is_not_waited_for(refusal: Any, run: Path) -> None:
    (run / "journal.jsonl").unlink()
    os.mkfifo(run / "journal.jsonl")
    for command in ("show", "report"):
        assert "RunError: Expected the journal of a run at" in refusal(command, run)


@pytest.mark.parametrize("name", [7, 0.5, ["x"], {"a": 1}, True])
def test_an_adapter_whose_base_is_no_name(refusal: Any, folder: Path, name: object) -> None:
    adapter = folder / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": name}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    assert "expected base_model_name_or_path to be text" in refusal("eval", adapter, "--dataset", "train.jsonl")
