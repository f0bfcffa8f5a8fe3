"""One task on this process's device: what is said where it cannot begin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import make_task

from alto.engine.runner import TaskRunner
from alto.errors import DeviceMemoryError, RunBusyError
from alto.executor import stages
from alto.runs import JournalEntry, RunDir, read_events
from alto.runs.events import JobEvaluated


def test_a_base_that_does_not_fit_says_what_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 14.00 GiB.")

    monkeypatch.setattr(stages, "load_backbone", out_of_memory)
    with pytest.raises(DeviceMemoryError, match=r"'alto-tiny' \(the whole model\) .* set num_gpus to more than 1"):
        TaskRunner().begin(make_task(tmp_path), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_run_whose_lock_file_is_removed_ends_before_it_writes_on(tmp_path: Path) -> None:
    def remove_lock(entry: JournalEntry) -> None:
        if isinstance(entry.event, JobEvaluated):
            next(tmp_path.glob("runs/*/run.lock")).unlink(missing_ok=True)

    with pytest.raises(RunBusyError, match="found it removed or replaced"):
        TaskRunner(observers=[remove_lock]).begin(make_task(tmp_path), tmp_path / "runs")
    (run,) = (tmp_path / "runs").iterdir()
    events = read_events(run / "journal.jsonl")
    assert events[-1]["event"] == "eval"
    assert not (run / "report.html").exists()
    assert TaskRunner().resume(RunDir.open(run), trust_remote_code=False).best_job


def test_no_turn_begins_after_the_lock_was_lost(tmp_path: Path) -> None:
    """Other ranks write states within a turn, and know of the lock by the first one alone."""
    num_asked: list[int] = [0]

    def remove_lock() -> bool:
        num_asked[0] += 1
        if num_asked[0] == 5:
            next(tmp_path.glob("runs/*/run.lock")).unlink()
        return False

    task = make_task(tmp_path, eval_steps=1.0, search_space={"lr": [1e-3]})
    with pytest.raises(RunBusyError, match="found it removed or replaced"):
        TaskRunner(is_interrupted=remove_lock).begin(task, tmp_path / "runs")
    assert num_asked == [5]
