"""Tasks of several users in one process, trained as they would be alone: real runs, real processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shared_runs import SharedRuns, assert_as_alone, shared_tasks
from tiny import read_journal, save_model

import alto
from alto.cluster import HostedRun, Outcome, RunEnd, TaskTicket, open_cluster
from alto.cluster.local import LocalCluster
from alto.data import JobRows, TokenBatch
from alto.engine import work
from alto.engine.estimates import remember_estimate
from alto.engine.runner import TaskRunner
from alto.errors import DeviceMemoryError, DiskFullError, RunBusyError, RunWriteError, TaskInterruptedError
from alto.executor import JobState, TaskSession, forward_plan
from alto.executor.trainer import Trainer
from alto.lora import eject
from alto.records import Sharing, TaskEstimate
from alto.runs import RunDir
from alto.spec import Task


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Task]:
    return shared_tasks(save_model(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def alone(tasks: Mapping[str, Task], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    folder = tmp_path_factory.mktemp("alone")
    return {name: TaskRunner().begin(task, folder).run_dir for name, task in tasks.items()}


@pytest.fixture
def shared(tmp_path: Path, tasks: Mapping[str, Task]) -> Iterator[SharedRuns]:
    cluster = LocalCluster()
    yield SharedRuns(cluster, tmp_path, tasks)
    cluster.close()


def test_tasks_train_together_as_by_themselves(shared: SharedRuns, alone: Mapping[str, str]) -> None:
    for name in shared.tasks:
        shared.attach(name)
        shared.until_event("job_admitted", name)
    for name in shared.tasks:
        ended = shared.until_ended(name)
        assert (ended.outcome, ended.reason) == (Outcome.FINISHED, "")
        assert_as_alone(shared.roots[name], alone[name])
        assert (shared.roots[name] / "report.html").exists()
    received = {
        name: event for name in shared.tasks for event in shared.lines_of(name) if event["event"] == "share_received"
    }
    assert len(received) >= 2
    for event in received.values():
        assert 0 < event["share"] < 1
        assert 0 < event["due_share"] < 1
    for name in shared.tasks:
        others = [other.encode() for other in shared.tasks if other != name]
        rows = [b"1 plus 1?"] if name == "birch" else [b"1 and 1?", b"1 1, no?"]
        for file, content in shared.files(name).items():
            assert not any(row in content for row in rows), f"{file} of {name} has a row of another task"
            assert not any(other in content for other in others), f"{file} of {name} speaks of another task"
    shared.attach("alder", attempt=2)  # it has its result
    assert shared.until_ended("alder", 2).outcome is Outcome.FINISHED


def test_a_task_with_a_bad_row_ends_alone(shared: SharedRuns, alone: Mapping[str, str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "completion": " 2"}\n{"prompt": 7}\n', encoding="utf-8")
    shared.tasks = {**shared.tasks, "cedar": shared.tasks["cedar"].replace(dataset=str(rows))}
    shared.attach("alder")
    shared.until_event("train", "alder")
    shared.attach("cedar")
    ended = shared.until_ended("cedar")
    assert ended.outcome is Outcome.FAILED
    assert "rows.jsonl" in ended.reason
    assert shared.until_ended("alder").outcome is Outcome.FINISHED
    assert_as_alone(shared.roots["alder"], alone["alder"])


def test_a_task_on_another_base_is_refused_and_changes_nothing(
    shared: SharedRuns, alone: Mapping[str, str], tmp_path: Path
) -> None:
    shared.tasks = {**shared.tasks, "cedar": shared.tasks["cedar"].replace(model="alto-tiny")}
    shared.attach("alder")
    shared.until_event("job_admitted", "alder")
    shared.attach("cedar")
    ended = shared.until_ended("cedar")
    assert (ended.outcome, ended.error) == (Outcome.LOST, "RunBusyError")
    assert "expected the base model of the tasks that this process trains, found 'alto-tiny'" in ended.reason
    assert shared.until_ended("alder").outcome is Outcome.FINISHED
    assert_as_alone(shared.roots["alder"], alone["alder"])


def test_a_killed_process_loses_no_task(shared: SharedRuns, alone: Mapping[str, str]) -> None:
    for name in shared.tasks:
        shared.attach(name)
    for name in shared.tasks:
        shared.until_event("eval", name)
    os.kill(shared.pid, signal.SIGKILL)
    for name in shared.tasks:
        assert shared.until_ended(name).outcome is Outcome.LOST
        shared.attach(name, attempt=2)
    for name in shared.tasks:
        assert shared.until_ended(name, 2).outcome is Outcome.FINISHED
        assert_as_alone(shared.roots[name], alone[name])


def test_one_task_is_cancelled_and_resumed_later(shared: SharedRuns, alone: Mapping[str, str]) -> None:
    shared.attach("alder")
    shared.until_event("job_admitted", "alder")
    shared.attach("birch")
    shared.until_event("job_admitted", "birch")
    shared.cluster.stop("alder")
    assert shared.until_ended("alder").outcome is Outcome.INTERRUPTED
    assert shared.until_ended("birch").outcome is Outcome.FINISHED
    pid = shared.pid
    shared.attach("alder", attempt=2)
    assert shared.until_ended("alder", 2).outcome is Outcome.FINISHED
    assert shared.pid == pid
    for name in ("alder", "birch"):
        assert_as_alone(shared.roots[name], alone[name])


def test_a_task_whose_folder_cannot_be_written_any_more_ends_alone(
    shared: SharedRuns, alone: Mapping[str, str]
) -> None:
    for name in ("alder", "birch"):
        shared.attach(name)
        shared.until_event("job_admitted", name)
    jobs = shared.roots["birch"] / "jobs"
    shutil.rmtree(jobs, ignore_errors=True)
    jobs.write_text("where a folder was", encoding="utf-8")
    ended = shared.until_ended("birch")
    assert (ended.outcome, ended.error) == (Outcome.LOST, "RunWriteError")
    assert str(shared.roots["birch"]) in ended.reason
    assert shared.until_ended("alder").outcome is Outcome.FINISHED
    jobs.unlink()
    shared.attach("birch", attempt=2)
    assert shared.until_ended("birch", 2).outcome is Outcome.FINISHED
    for name in ("alder", "birch"):
        assert_as_alone(shared.roots[name], alone[name])


def test_a_changed_base_is_loaded_again_by_the_process_that_has_it(shared: SharedRuns, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    shared.tasks = {name: task.replace(model=str(model)) for name, task in shared.tasks.items()}
    shared.attach("alder")
    assert shared.until_ended("alder").outcome is Outcome.FINISHED
    config = json.loads((model / "config.json").read_text("utf-8"))
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}), encoding="utf-8")
    pid = shared.pid
    shared.attach("cedar")
    assert shared.until_ended("cedar").outcome is Outcome.FINISHED
    assert shared.pid == pid
    expected = TaskRunner().begin(shared.tasks["cedar"], tmp_path / "expected").run_dir
    assert_as_alone(shared.roots["cedar"], expected)


@pytest.mark.parametrize("kept_alone", ["nobody", "one task", "the queue"])
def test_a_queue_trains_tasks_in_one_process_where_they_and_it_allow_that(
    kept_alone: str,
    tasks: Mapping[str, Task],
    alone: Mapping[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One slot, and steps that take nearly as long for one task as for three."""
    monkeypatch.setenv("ALTO_CACHE", str(tmp_path / "cache"))
    sharing = Sharing(base="m", step_s=9.0, num_slots=2, slot_bytes=10**6, pass_bytes=10**8, capacity_bytes=10**10)
    submitted = dict(tasks)
    if kept_alone == "one task":
        submitted["birch"] = submitted["birch"].replace(share_executor=False)
    engine = alto.Engine(
        strategy="single", total_gpus=1, output_dir=tmp_path / "runs", share_executor=kept_alone != "the queue"
    )
    with contextlib.closing(open_cluster("local", total_gpus=1)) as cluster:
        for task in submitted.values():
            remember_estimate(task, cluster, 1, TaskEstimate(duration_s=10.0, sharing=sharing))
    results = engine.batched_execution(list(submitted.values()), engine.schedule(list(submitted.values())))
    for name, result in zip(submitted, results, strict=True):
        assert_as_alone(result.run_dir, alone[name])
    (root,) = (tmp_path / "runs").glob("queue-*")
    started = [event for event in read_journal(root) if event["event"] == "executor_started"]
    executors = {event["task"]: event.get("executor") for event in started}
    assert len(started) == 3
    together = [name for name in submitted if executors[name] and list(executors.values()).count(executors[name]) > 1]
    assert together == {"nobody": list(submitted), "one task": ["alder", "cedar"], "the queue": []}[kept_alone]


def test_a_session_that_cannot_begin_does_not_keep_the_bank(
    tasks: Mapping[str, Task], alone: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = work.Training()
    for name in ("alder", "cedar"):
        RunDir(tmp_path / name).begin(tasks[name])
    with monkeypatch.context() as broken:
        broken.setattr(TaskSession, "begin", lambda self: (_ for _ in ()).throw(DiskFullError("no room")))
        with pytest.raises(DiskFullError):
            host.attach(HostedRun(number=1, ticket=ticket_of(str(tmp_path / "alder")), is_interrupted=lambda: False))
    host.attach(HostedRun(number=2, ticket=ticket_of(str(tmp_path / "cedar")), is_interrupted=lambda: False))
    while not (ended := host.turn()):
        pass
    assert ended == {2: RunEnd()}
    assert_as_alone(tmp_path / "cedar", alone["cedar"])


def ticket_of(run_dir: str, **owner: Any) -> TaskTicket:
    return TaskTicket(task=run_dir, run_dir=run_dir, host=work.TRAIN, **owner)


def hosted(
    host: work.Training,
    number: int,
    task: Task,
    folder: Path,
    *,
    is_interrupted: Callable[[], bool] = lambda: False,
    **owner: Any,
) -> None:
    RunDir(folder).begin(task)
    host.attach(HostedRun(number=number, ticket=ticket_of(str(folder), **owner), is_interrupted=is_interrupted))


def test_an_error_that_belongs_to_no_task_ends_all_with_its_reason(
    tasks: Mapping[str, Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = work.Training()
    for number, name in enumerate(("alder", "cedar")):
        hosted(host, number, tasks[name], tmp_path / name)
    host.turn()

    def no_memory(*_: object) -> None:
        raise DeviceMemoryError("none left, as the test wants it")

    monkeypatch.setattr(Trainer, "update", no_memory)
    ended = host.turn()
    assert {number: type(end.error) for number, end in ended.items()} == {0: DeviceMemoryError, 1: DeviceMemoryError}
    for number, name in enumerate(("alder", "cedar")):
        assert f"task '{name}': none left, as the test wants it" in str(ended[number].error)
        assert str(tmp_path / name) in str(ended[number].error), "the message says where to resume it"
    assert not host.is_usable
    assert host.turn() == {}


def test_rows_that_cannot_be_read_for_the_next_step_end_their_task_in_this_one(
    tasks: Mapping[str, Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, failures = work.Training(), list[str]()
    for number, name in enumerate(("alder", "cedar")):
        hosted(host, number, tasks[name], tmp_path / name)
    rows = host._executor.sessions["1"].state.context.data.train
    collate, backward = forward_plan.collate, Trainer.backward
    steps_of_cedar = 0

    def counted(self: Trainer, jobs: Sequence[JobState]) -> torch.Tensor:
        nonlocal steps_of_cedar
        losses = backward(self, jobs)
        steps_of_cedar += any(job.context.data.train is rows for job in jobs)
        return losses

    def broken_after_a_step(parts: Sequence[JobRows], device: torch.device) -> TokenBatch:
        if steps_of_cedar and len(failures) < 2 and any(part.dataset is rows for part in parts):
            failures.append("once for both tasks, and once to find whose it is")
            raise OSError("the file is gone")
        return collate(parts, device)

    monkeypatch.setattr(Trainer, "backward", counted)
    monkeypatch.setattr(forward_plan, "collate", broken_after_a_step)
    ended: Mapping[int, RunEnd] = {}
    while not ended:
        ended = host.turn()
    assert {number: type(end.error) for number, end in ended.items()} == {1: OSError}
    assert steps_of_cedar == 1
    finish(host, 1)


def test_work_on_one_run_is_a_sign_of_life_of_all(tasks: Mapping[str, Task], tmp_path: Path) -> None:
    host, num_calls, is_over = work.Training(), [0, 0], list[bool]()

    def is_asked(number: int) -> bool:
        num_calls[number] += 1
        if number:
            raise RunWriteError("its own turn finds this")
        return bool(is_over)

    hosted(host, 0, tasks["alder"], tmp_path / "alder", is_interrupted=lambda: is_asked(0))
    hosted(host, 1, tasks["cedar"], tmp_path / "cedar", is_interrupted=lambda: is_asked(1))
    session = host._executor.sessions["0"]
    before = list(num_calls)
    session._check_stop()
    assert num_calls == [before[0] + 1, before[1] + 1]
    assert isinstance(host.turn()[1].error, RunWriteError)
    is_over.append(True)
    finish(host, 1)


def test_a_measurement_that_fails_leaves_the_base_model_to_the_others(
    tasks: Mapping[str, Task], alone: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = work.Training()
    hosted(host, 0, tasks["alder"], tmp_path / "alder")
    host.turn()

    def measured(context: Any, **others: Any) -> Any:
        eject(context.backbone.model)
        raise DeviceMemoryError("none for the measurement")

    with monkeypatch.context() as broken:
        broken.setattr("alto.engine.runner.pack", measured)
        with pytest.raises(DeviceMemoryError):
            hosted(host, 1, tasks["cedar"], tmp_path / "cedar")
    while not (ended := host.turn()):
        pass
    assert ended == {0: RunEnd()}
    assert_as_alone(tmp_path / "alder", alone["alder"])


def finish(host: work.Training, num_runs: int) -> dict[int, RunEnd]:
    ended: dict[int, RunEnd] = {}
    while len(ended) < num_runs:
        ended |= host.turn()
    return ended


def test_all_tasks_are_stopped_at_once_and_each_is_resumed_by_itself(
    tasks: Mapping[str, Task], alone: Mapping[str, str], tmp_path: Path
) -> None:
    host, stop_requests = work.Training(), list[bool]()
    for number, name in enumerate(tasks):
        hosted(host, number, tasks[name], tmp_path / name, is_interrupted=lambda: bool(stop_requests))
        host.turn()
    host.turn()
    stop_requests.append(True)
    ended = finish(host, len(tasks))
    assert all(isinstance(end.error, TaskInterruptedError) for end in ended.values())
    for name in tasks:
        assert read_journal(tmp_path / name)[-1]["event"] == "task_interrupted"
        TaskRunner().resume(RunDir(tmp_path / name), trust_remote_code=False)
        assert_as_alone(tmp_path / name, alone[name])


def test_a_run_that_is_attached_twice_is_refused_and_goes_on(
    tasks: Mapping[str, Task], alone: Mapping[str, str], tmp_path: Path
) -> None:
    host = work.Training()
    hosted(host, 0, tasks["cedar"], tmp_path / "cedar")
    host.turn()
    with pytest.raises(RunBusyError, match="cedar"):
        host.attach(HostedRun(number=1, ticket=ticket_of(str(tmp_path / "cedar")), is_interrupted=lambda: False))
    assert finish(host, 1) == {0: RunEnd()}
    assert_as_alone(tmp_path / "cedar", alone["cedar"])


@pytest.mark.parametrize(("key", "expected"), [("adapter_dtype", "float32"), ("optim_state_dtype", "none")])
def test_another_dtype_of_the_bank_is_refused(
    key: str, expected: str, tasks: Mapping[str, Task], tmp_path: Path
) -> None:
    host, stop_requests = work.Training(), list[bool]()
    hosted(host, 0, tasks["alder"], tmp_path / "alder", is_interrupted=lambda: bool(stop_requests))
    with pytest.raises(RunBusyError, match=rf"{key}: expected {expected}, .* found bfloat16"):
        hosted(host, 1, tasks["cedar"].replace(**{key: "bfloat16"}), tmp_path / "cedar")
    assert host.turn() == {}
    stop_requests.append(True)
    finish(host, 1)


def test_tasks_weigh_by_tenant_and_priority_among_those_that_are_there(
    tasks: Mapping[str, Task], tmp_path: Path
) -> None:
    host, stopped = work.Training(), set[str]()
    owners = {"alder": ("x", 0), "birch": ("y", 0), "cedar": ("y", 1)}
    for number, (name, (tenant, priority)) in enumerate(owners.items()):
        facts: dict[str, Any] = {"tenant": tenant, "priority": priority}
        hosted(host, number, tasks[name], tmp_path / name, is_interrupted=partial(stopped.__contains__, name), **facts)
    assert host._executor._weights == pytest.approx({"0": 1.0, "1": 1 / 3, "2": 2 / 3})
    stopped.add("cedar")
    assert list(host.turn()) == [2]
    assert host._executor._weights == {"0": 1.0, "1": 1.0}
    stopped.update(owners)
    finish(host, 2)


def test_a_task_leaves_the_state_of_its_process_as_it_was(tasks: Mapping[str, Task], tmp_path: Path) -> None:
    def state() -> dict[str, Any]:
        return {
            "torch": torch.get_rng_state().tolist(),
            "random": random.getstate(),
            "numpy": [str(part) for part in np.random.get_state()],
            "variables": dict(os.environ),
            "dtype": torch.get_default_dtype(),
            "threads": torch.get_num_threads(),
            "warnings": list(warnings.filters),
            "folder": Path.cwd(),
            "gradients": torch.is_grad_enabled(),
            "precision": torch.get_float32_matmul_precision(),
        }

    host = work.Training()
    hosted(host, 0, tasks["cedar"], tmp_path / "first")  # imports may change them once
    finish(host, 1)
    before = state()
    hosted(host, 1, tasks["birch"], tmp_path / "second")
    finish(host, 1)
    assert state() == before


def test_a_process_keeps_no_adapter_after_its_last_task(tasks: Mapping[str, Task], tmp_path: Path) -> None:
    host, stop_requests = work.Training(), list[bool]()
    for number, name in enumerate(("alder", "cedar")):
        hosted(host, number, tasks[name], tmp_path / name, is_interrupted=lambda: bool(stop_requests))
    model = host._executor.sessions["0"].state.context.backbone.model
    modules = {name: type(module).__name__ for name, module in model.named_modules()}
    stop_requests.append(True)
    finish(host, 2)
    left = {name: type(module).__name__ for name, module in model.named_modules()}
    assert "MultiLoraLinear" in modules.values()
    assert "MultiLoraLinear" not in left.values()
