"""``alto plan``: time and memory of tasks before they are trained."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from profiles import measured_at_once
from tiny import write_rows
from typer.testing import CliRunner

from alto.cli import app
from alto.runs import RunDir, RunHistory, read_entries
from alto.runs.events import ProfileMeasured
from alto.runs.progress import outlook
from alto.views.wording import format_duration


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
    assert re.search(r"disk: at most [\d.]+ MiB during training, of [\d.,]+ [GM]iB free", text)
    assert "may take" not in text
    assert not (task_file.parent / "runs").exists()
    assert "measured earlier" in " ".join(CliRunner().invoke(app, ["plan", str(task_file)]).output.split())
    assert "measured now" in " ".join(CliRunner().invoke(app, ["plan", str(task_file), "--refresh"]).output.split())


def test_a_plan_says_that_its_time_is_the_budget(task_file: Path):
    def planned(*options: str) -> dict[str, object]:
        [facts] = json.loads(CliRunner().invoke(app, ["plan", str(task_file), "--json", *options]).output)["tasks"]
        return facts

    budget_s = 0.99 * float(planned()["duration_s"])
    budget = ("--set", f"search.budget.duration_s={budget_s}")
    text = " ".join(CliRunner().invoke(app, ["plan", str(task_file), *budget]).output.split())
    assert f"time: at most {format_duration(budget_s)} (search.budget)" in text
    assert "early exit off" not in text
    assert planned(*budget)["is_at_budget"]
    enough = ("--set", f"search.budget.duration_s={10 * budget_s}")
    assert not planned(*enough)["is_at_budget"]
    text = " ".join(CliRunner().invoke(app, ["plan", str(task_file), *enough]).output.split())
    assert "with early exit off" in text
    assert "search.budget" not in text


def test_a_plan_says_that_the_disk_may_be_too_small(task_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("alto.executor.profiling.planning.free_bytes", lambda folder: 2**10)
    found = json.loads(CliRunner().invoke(app, ["plan", str(task_file), "--json"]).output)["tasks"][0]
    assert found["disk_free_bytes"] == 2**10 < found["disk_bytes"]
    assert [note for note in found["notes"] if "of disk space while they train, and 0 MiB are free in" in note]


def test_a_plan_says_what_it_measures_before_it_does_and_nothing_where_a_measurement_is_kept(task_file: Path):
    first, second = (CliRunner().invoke(app, ["plan", str(task_file)]) for _ in range(2))
    assert "measuring memory and time of" in first.stderr
    assert "for later runs of the same task" in first.stderr
    assert "measuring" not in first.stdout.split("jobs:")[0]
    assert "including the measurement, which a run of the same task does not repeat" in " ".join(first.stdout.split())
    assert second.stderr == ""
    assert "including the measurement" not in second.stdout


@pytest.mark.slow("queues")
def test_a_plan_is_json_for_scripts(task_file: Path):
    shown = CliRunner().invoke(app, ["plan", str(task_file), str(task_file), "--json", "--gpu-hour-price", "2"])
    first, second = json.loads(shown.output)["tasks"]
    assert first["num_jobs"] == 4
    assert first["cost"] == pytest.approx(first["duration_s"] / 1800)
    assert second["is_cached"] is True


@pytest.mark.slow("queues")
def test_a_plan_of_several_tasks_says_once_what_is_measured_once(task_file: Path):
    other = task_file.with_name("other.yaml")
    other.write_text(task_file.read_text(encoding="utf-8"), encoding="utf-8")
    shown = CliRunner().invoke(app, ["plan", str(task_file), str(other), "--total-gpus", "2"])
    assert shown.exit_code == 0, shown.output
    assert "measured earlier" in shown.stdout
    assert shown.stderr.count("measuring memory and time of") == 1


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


def test_a_plan_says_why_there_is_one_slot(task_file: Path):
    """The device's best measured speed is at steps of 1,000 tokens."""
    one = ["plan", str(task_file), "--set", "per_device_train_batch_size=200"]
    shown = " ".join(CliRunner().invoke(app, one).output.split())
    assert "one slot: the smallest job alone has" in shown
    assert "faster per token than that of 1,000" in shown
    [facts] = json.loads(CliRunner().invoke(app, [*one, "--json"]).output)["tasks"]
    assert facts["max_slots"] == 1
    assert facts["why_one_slot"].startswith("the smallest job alone has")
    assert "one slot" not in CliRunner().invoke(app, ["plan", str(task_file)]).output


def test_the_error_of_the_memory_estimate_is_called_so(task_file: Path):
    shown = " ".join(CliRunner().invoke(app, ["plan", str(task_file)]).output.split())
    assert re.search(
        r"memory estimate error [\d.]+ % \(at worst [\d.]+ %\)|too few to know the memory estimate error", shown
    )


def test_what_is_planned_is_what_a_run_expects_and_shows(task_file: Path, monkeypatch: pytest.MonkeyPatch):
    """``alto plan``, the journal, the output of ``alto tune`` and the run's forecast agree."""
    brief = ["--set", "max_steps=4"]
    [plan] = json.loads(CliRunner().invoke(app, ["plan", str(task_file), "--json", *brief]).output)["tasks"]
    expected_s = plan["expected_duration_s"]
    tuned = CliRunner().invoke(app, ["tune", str(task_file), *brief])
    assert tuned.exit_code == 0, tuned.output
    assert f"about {format_duration(expected_s)} expected" in tuned.stdout
    (run,) = (task_file.parent / "runs").iterdir()
    entries = read_entries(run / "journal.jsonl")
    profiled = next(index for index, entry in enumerate(entries) if isinstance(entry.event, ProfileMeasured))
    assert entries[profiled].event.expected_duration_s == expected_s
    begun = RunHistory.of(entries[: profiled + 1])
    assert begun.started_at is not None
    assert outlook(begun, begun.started_at).remaining_s == expected_s
    # The output of alto show for a running task.
    lines = (run / "journal.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (run / "journal.jsonl").write_text("".join(lines[: profiled + 1]), encoding="utf-8")
    monkeypatch.setattr("alto.cli.show.time.time", lambda: begun.started_at)
    with RunDir(run).locked():
        facts = json.loads(CliRunner().invoke(app, ["show", str(run), "--json"]).output)
        shown = CliRunner().invoke(app, ["show", str(run)]).output
    assert (facts["remaining_s"], facts["tokens_per_s"], facts["done"]) == (expected_s, None, 0.0)
    assert f"0 % done · about {format_duration(expected_s)} left" in shown
    interrupted = json.loads(CliRunner().invoke(app, ["show", str(run), "--json"]).output)
    assert (interrupted["state"], interrupted["remaining_s"]) == ("interrupted", None)


def test_long_lines_of_a_plan_continue_below_their_own_beginning(task_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "60")
    lines = CliRunner().invoke(app, ["plan", str(task_file)]).output.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("packing:    max_slots"))
    assert lines[start + 1].startswith(" " * 12)
    assert not lines[start + 1].startswith(" " * 13)
    assert "at most" in " ".join(line.strip() for line in lines[start : start + 3])
