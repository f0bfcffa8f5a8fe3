"""``alto plan``: what tasks take, before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from profiles import measured_at_once
from tiny import write_rows
from typer.testing import CliRunner

from alto.cli import app


@pytest.fixture
def task_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A task of four jobs, and a device with 1,000 MiB."""
    monkeypatch.setenv("ALTO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    measured_at_once(monkeypatch)
    write_rows(tmp_path / "rows.jsonl")
    file = tmp_path / "task.yaml"
    file.write_text(
        "model: alto-tiny\ndataset: rows.jsonl\nsearch_space: {r: [2, 8], learning_rate: [1.0e-3, 1.0e-2]}\n",
        encoding="utf-8",
    )
    return file


def test_a_plan_is_shown_and_nothing_is_run(task_file: Path):
    shown = CliRunner().invoke(app, ["plan", str(task_file), "--gpu-hour-price", "2.5"])
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.output.split())
    assert "jobs: 4" in text
    assert "trainable parameters" in text
    assert "measured now" in text
    assert "max_slots" in text
    assert "chosen" in text
    assert "which costs" in text
    assert not (task_file.parent / "runs").exists()
    assert "measured earlier" in " ".join(CliRunner().invoke(app, ["plan", str(task_file)]).output.split())
    assert "measured now" in " ".join(CliRunner().invoke(app, ["plan", str(task_file), "--refresh"]).output.split())


@pytest.mark.slow("queues")
def test_a_plan_is_json_for_scripts(task_file: Path):
    shown = CliRunner().invoke(app, ["plan", str(task_file), str(task_file), "--json", "--gpu-hour-price", "2"])
    first, second = json.loads(shown.output)["tasks"]
    assert first["num_jobs"] == 4
    assert first["cost"] == pytest.approx(first["duration_s"] / 1800)
    assert second["is_cached"] is True


def test_a_task_that_cannot_fit_is_refused_with_what_fits(task_file: Path):
    shown = CliRunner().invoke(app, ["plan", str(task_file), "--set", "max_tokens_per_pass=100000"])
    assert shown.exit_code == 1
    assert "lower max_slots or max_tokens_per_pass" in str(shown.exception)


def test_a_plan_says_what_of_the_data_nothing_reads(task_file: Path):
    file = task_file.parent / "rows.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    file.write_text("".join(json.dumps({**row, "source": "web"}) + "\n" for row in rows), encoding="utf-8")
    shown = CliRunner().invoke(app, ["plan", str(task_file)])
    assert shown.exit_code == 0, shown.output
    assert "note: Columns that nothing reads: source (in 24 rows);" in " ".join(shown.output.split())
    [facts] = json.loads(CliRunner().invoke(app, ["plan", str(task_file), "--json"]).output)["tasks"]
    assert any("source (in 24 rows)" in note for note in facts["notes"])
