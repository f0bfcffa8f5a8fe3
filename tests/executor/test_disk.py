"""The disk space that a task needs, reported before it trains."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import load_tiny, make_task, read_journal, run_task

from alto.executor import TaskContext
from alto.executor.profiling import planning
from alto.executor.profiling.planning import disk_bytes, disk_notes, free_bytes
from alto.runs import RunDir
from alto.spec import Task

SPACE = {"r": [2, 8], "lr": [1e-3, 1e-2]}


def context_of(task: Task) -> TaskContext:
    return TaskContext.of(task, *load_tiny(task))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"adapter_dtype": "bfloat16"},
        {"optim_state_dtype": "bfloat16"},
        {"optim": "sgd", "optim_args": {"momentum": 0.9}},
        {"use_dora": True},
    ],
    ids=str,
)
def test_it_is_what_the_states_of_all_jobs_take(settings: dict[str, Any], tmp_path: Path) -> None:
    task = make_task(tmp_path, search_space=SPACE, early_exit=False, keep="all", **settings)
    run_dir = RunDir.create(tmp_path / "runs", task)
    run_task(task, run_dir)
    tensors = [tensor for file in run_dir.root.glob("jobs/*/*/*.safetensors") for tensor in load_file(file).values()]
    found = sum(tensor.nbytes for tensor in tensors if tensor.dtype is not torch.int64)
    needed = disk_bytes(context_of(task), 0)
    assert found == pytest.approx(needed, rel=0.02)
    largest = max(planning._bytes_of(task, job) for job in context_of(task).jobs)
    assert disk_bytes(context_of(task), 1) == needed + largest, "a checkpoint that replaces a state is there twice"


def test_jobs_that_a_search_will_add_are_counted(tmp_path: Path) -> None:
    space = {"lr": {"min": 1e-4, "max": 1e-2, "log": True}, "r": [8]}
    search = {"algorithm": "tpe", "num_initial_jobs": 2}
    few, many = (make_task(tmp_path, search_space=space, search={**search, "budget": {"jobs": num}}) for num in (4, 8))
    assert disk_bytes(context_of(many), 0) == 2 * disk_bytes(context_of(few), 0)


def test_space_is_looked_up_where_the_run_would_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = []
    usage = shutil.disk_usage

    def noted(path: Path) -> Any:
        paths.append(path)
        return usage(path)

    monkeypatch.setattr(shutil, "disk_usage", noted)
    assert free_bytes(tmp_path / "not" / "there" / "yet") > 0
    assert paths == [tmp_path.resolve()]


def test_only_too_little_space_is_worth_a_note(tmp_path: Path) -> None:
    assert disk_notes(10 * 2**20, 10 * 2**20, tmp_path) == ()
    (note,) = disk_notes(11 * 2**20, 10 * 2**20, tmp_path)
    assert note.startswith("The adapters and states of all jobs may take 11 MiB of disk space")
    assert f"and 10 MiB are free in {tmp_path}: free some" in note


def test_a_run_notes_in_its_journal_that_space_may_not_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alto.executor.beginning.free_bytes", lambda folder: 1000)
    task = make_task(tmp_path, search_space={"r": [8]})
    run_dir = RunDir.create(tmp_path / "runs", task)
    run_task(task, run_dir)
    notes = read_journal(run_dir.root)[0]["notes"]
    assert [note for note in notes if "disk space" in note and f"0 MiB are free in {run_dir.root}" in note]
