"""The overview of a folder of runs, including damaged ones, reads no more than it needs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_folders import write_journal, write_queue, write_run
from tiny import make_task

from alto.runs import RunDir, RunState, find_runs, latest_run, overview, summarise
from alto.runs.events import codec

Events = list[dict[str, Any]]
START = 1_763_635_000.0


def test_a_finished_run_an_interrupted_one_and_one_that_is_worked_on(
    tmp_path: Path, small_run: Events, preference_run: Events
) -> None:
    finished = summarise(write_run(tmp_path, "done", small_run, start=START))
    assert (finished.state, finished.tasks, finished.num_jobs) == (RunState.FINISHED, ("maths",), 4)
    assert (finished.best_validation_loss, finished.fraction_done, finished.problem) == (1.9, 1.0, "")
    # a, b and c have done a tenth; b and c wait for the rung, d has done nothing, and two of the three continue.
    stopped = write_run(tmp_path, "stopped", small_run[:13], start=START)
    found = summarise(stopped)
    assert (found.state, found.best_validation_loss) == (RunState.INTERRUPTED, 2.2)
    assert found.fraction_done == pytest.approx(300 / (300 + 1900))
    with RunDir(stopped).locked():
        assert summarise(stopped).state is RunState.RUNNING
    # Chosen by accuracy: the loss is the chosen job's, not the lowest.
    assert summarise(write_run(tmp_path, "pairs", preference_run, start=START)).best_validation_loss == 0.6


def test_a_run_that_has_only_been_made_is_listed(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, make_task(tmp_path))
    found = summarise(run.root)
    assert (found.state, found.tasks, found.num_jobs, found.fraction_done) == (RunState.INTERRUPTED, (), None, 0.0)


def test_jobs_that_were_added_are_counted_of_a_finished_run_too(tmp_path: Path, interrupted_run: Events) -> None:
    completed = {"time": interrupted_run[-1]["time"] + 1, "event": "task_completed", "best_job": "b"}
    events = [*interrupted_run, {**completed, "best_validation_loss": 1.8}]
    assert summarise(write_run(tmp_path, "run", events, start=START)).num_jobs == 3


def test_a_queue_sums_up_its_tasks(tmp_path: Path, small_run: Events) -> None:
    tasks = {name: make_task(tmp_path, name=name) for name in ("a", "b")}
    queue = write_queue(tmp_path / "runs", tasks, start=START)
    write_journal(queue.run_of("a").journal_file, small_run[:13], start=START)
    found = summarise(queue.root)
    assert (found.is_queue, found.state, found.tasks) == (True, RunState.INTERRUPTED, ("a", "b"))
    assert (found.num_jobs, found.best_validation_loss) == (4, None)  # losses of several tasks are not compared
    assert found.fraction_done == pytest.approx((300 / 2200 + 0.0) / 2)
    queue.run_of("b").task_file.unlink()
    assert "task b: expected the task of the run" in summarise(queue.root).problem


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a line in the middle": lambda run: _replace_line(run, 5, '{"seq": 5, "ti\x00'),
    "a wrong type": lambda run: _replace_line(run, 0, '{"seq": 0, "time": 7.0, "event": "task_started", "task": 7}'),
    "another event": lambda run: _replace_line(run, 1, '{"seq": 1, "time": 8.0, "event": "eval", "job": "z"}'),
    "another time": lambda run: _replace_line(run, 0, '{"seq": 0, "time": "noon", "event": "task_started"}'),
    "no text": lambda run: (run / "journal.jsonl").write_bytes(os.urandom(300) + b"\n\xff\n"),
    "no task": lambda run: (run / "task.yaml").unlink(),
    "a folder": lambda run: ((run / "journal.jsonl").unlink(), (run / "journal.jsonl").mkdir()),
}


def _replace_line(run: Path, index: int, line: str) -> None:
    path = run / "journal.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[index] = line
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("is_finished", [True, False])
def test_a_damaged_run_says_what_is_wrong(damage: str, is_finished: bool, tmp_path: Path, small_run: Events) -> None:
    root = write_run(tmp_path, "run", small_run if is_finished else small_run[:13], start=START)
    DAMAGES[damage](root)
    if damage == "another event" and is_finished:
        return  # the events of its jobs are not decoded
    found = summarise(root)
    assert (found.state, found.num_jobs) == (RunState.DAMAGED, None)
    assert "expected" in found.problem.lower()
    assert find_runs(tmp_path) == [root]


def test_few_lines_of_a_finished_run_are_decoded(
    tmp_path: Path, sweep: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []
    decode = codec.decode
    for module in (codec, overview):
        monkeypatch.setattr(module, "decode", lambda line, source: decoded.append(line) or decode(line, source))
    assert summarise(write_run(tmp_path, "run", sweep, start=START)).num_jobs == 60
    assert len(sweep) > 2000
    assert len(decoded) <= 4


def test_the_newest_is_the_one_that_began_last(tmp_path: Path, small_run: Events) -> None:
    """Neither the name nor the time of a file decides, because reports are rewritten and folders copied."""
    for name, start in (("b", 200.0), ("z", 100.0), ("a", 300.0)):
        write_run(tmp_path, name, small_run, start=START + start)
    later = time.time() + 9999
    os.utime(tmp_path / "z", (later, later))
    (tmp_path / ".a.new").mkdir()
    (tmp_path / ".a.new" / "journal.jsonl").touch()
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").touch()
    assert [root.name for root in find_runs(tmp_path)] == ["a", "b", "z"]
    assert latest_run(tmp_path) == tmp_path / "a"
    assert latest_run(tmp_path, lambda root: root.name == "z") == tmp_path / "z"
    assert latest_run(tmp_path, lambda root: False) is None
    assert find_runs(tmp_path / "absent") == []


def test_runs_of_version_0_1_are_listed(tmp_path: Path) -> None:
    found = [summarise(root) for root in find_runs(Path(__file__).parent / "journals_0_1")]
    assert [(run.root.name, run.state.value, run.num_jobs) for run in found] == [
        ("queue", "interrupted", 4),
        ("interrupted", "interrupted", 2),
        ("finished", "finished", 4),
    ]
