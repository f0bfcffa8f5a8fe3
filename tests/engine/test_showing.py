"""What the engine prints of a task in Python: nothing, or its progress and its table of jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

import alto

ROWS = [{"prompt": f"{n} + {n} =", "completion": f" {2 * n}"} for n in range(1, 13)]


def tune(folder: Path, *, progress: bool | None) -> alto.TaskResult:
    task = alto.Task(model="alto-tiny", dataset=ROWS, name="sums", max_steps=2, search_space={"r": [2, 4]})
    return alto.Engine(output_dir=folder, progress=progress).tune(task)


@pytest.mark.parametrize("progress", [False, None], ids=["never", "not-a-terminal"])
def test_nothing_is_printed_where_it_is_not_asked_for(
    progress: bool | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tune(tmp_path, progress=progress)
    assert capsys.readouterr().out == ""


def test_progress_and_then_the_table_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tune(tmp_path, progress=True)
    shown = capsys.readouterr().out
    assert "task sums: 2 jobs (sft)" in shown
    progress, _, table = shown.partition("sums finished after")
    assert "admitted job-000" in progress
    assert f"★ {result.best_job}" in table
    assert "admitted" not in table


def test_a_finished_run_that_is_resumed_shows_its_table_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tune(tmp_path, progress=False)
    again = alto.Engine(output_dir=tmp_path, progress=True).resume(result.run_dir)
    assert again.best_job == result.best_job
    assert f"★ {result.best_job}" in capsys.readouterr().out
    assert alto.Engine(output_dir=tmp_path, progress=False).resume(result.run_dir).best_job == result.best_job
    assert capsys.readouterr().out == ""
