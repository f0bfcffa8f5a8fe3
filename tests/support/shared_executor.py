"""An executor in this process, and tasks on its base model that join it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from resident_jobs import DATA, PAIRS, make_dataset, make_model, make_task, start_of
from resident_jobs import with_references as referenced

from alto.backbone import Backbone
from alto.data import TaskData
from alto.executor import (
    Executor,
    Hooks,
    Ranks,
    RunInputs,
    SharedBank,
    TaskContext,
    TaskSession,
    recover,
    run_alone,
)
from alto.runs import Journal, RunDir, read_events
from alto.spec import Task

OTHER = TaskData(train=make_dataset(17, seed=11), validation=make_dataset(5, seed=12))
WIDE = [{"lr": 1e-4, "r": 16, "batch_size": 3, "seed": 3, "lora_dropout": 0.2}]
Curves: TypeAlias = Mapping[str, dict[str, list[float]]]
SETTINGS: dict[str, Any] = {"eval_steps": 0.25, "max_tokens_per_pass": 200, "early_exit": {"enabled": False}}


def tasks() -> dict[str, tuple[Task, TaskData]]:
    """Return tasks on one base: two datasets and three methods, mixed ranks, batch sizes and lengths."""
    plain = [{"lr": 2e-4, "r": 4, "batch_size": 4, "seed": 1}, {"lr": 1e-4, "r": 8, "batch_size": 2, "seed": 2}]
    some = [{"lr": 1e-4, "r": 2, "batch_size": 5, "seed": 4, "target_modules": ["q_proj", "v_proj"]}]
    found = {
        "ash": (make_task(plain, **SETTINGS), DATA),
        "birch": (make_task(WIDE, num_train_epochs=1, **SETTINGS), OTHER),
        "cedar": (make_task(WIDE, method="dpo", beta=0.3, **SETTINGS), PAIRS),
        "dogwood": (make_task(plain, method="orpo", **SETTINGS), PAIRS),
        "elm": (make_task(some, **SETTINGS), DATA),
    }
    return {name: (task.replace(name=name), data) for name, (task, data) in found.items()}


class SharedExecutor:
    """An executor, and the tasks that join it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.backbone = Backbone(make_model("llama"), None, "unused")
        self.executor = Executor(SharedBank(self.backbone, Ranks(), "float32"))
        self.ended: dict[str, Exception | None] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> SharedExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def attach(self, name: str, task: Task, data: TaskData, *, hooks: Hooks | None = None, weight: float = 1.0) -> None:
        session = self._stack.enter_context(
            built(self.folder / name, task, data, self.backbone, hooks=hooks, bank=self.executor.bank)
        )
        self.executor.attach(name, session, weight=weight)

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.ended |= self.executor.turn()

    def finish(self) -> None:
        while self.executor.sessions:
            self.turn()


@contextlib.contextmanager
def built(
    folder: Path,
    task: Task,
    data: TaskData,
    backbone: Backbone,
    *,
    hooks: Hooks | None = None,
    bank: SharedBank | None = None,
) -> Iterator[TaskSession]:
    run_dir = RunDir(next(iter(folder.iterdir()))) if folder.exists() else RunDir.create(folder, task)
    context = TaskContext.of(task, backbone, data, start=start_of(task, backbone))
    if context.objective.needs_reference:
        assert context.start is None, "the references must be the base's"
        context = replace(context, data=referenced(backbone, data))
    resume_state = recover(run_dir)
    with Journal(run_dir.journal_file, past=resume_state.entries) as journal:
        start = RunInputs(run_dir=run_dir, resume_state=resume_state)
        yield TaskSession(context, journal, start, hooks, bank)


def events_of(folder: Path) -> list[dict[str, Any]]:
    (run,) = folder.iterdir()
    return list(read_events(run / "journal.jsonl"))


def curves(folder: Path) -> dict[str, list[float]]:
    """Return every training and validation loss of every job, in order."""
    found: dict[str, list[float]] = {}
    for event in events_of(folder):
        if event["event"] == "train":
            found.setdefault(event["job"], []).extend(event["losses"])
        elif event["event"] == "eval":
            found.setdefault(event["job"] + " validation", []).append(event["validation_loss"])
    return found


def curves_alone(folder: Path, given: Mapping[str, tuple[Task, TaskData]]) -> Curves:
    """Return the curves of every task when it trains alone."""
    for name, (task, data) in given.items():
        with built(folder / name, task, data, Backbone(make_model("llama"), None, "unused")) as session:
            run_alone(session)
    return {name: curves(folder / name) for name in given}


def assert_as_alone(folder: Path, names: Sequence[str], alone: Curves) -> None:
    for name in names:
        found = curves(folder / name)
        assert found.keys() == alone[name].keys()
        for job, losses in alone[name].items():
            assert found[job] == pytest.approx(losses, rel=1e-4, abs=1e-6), (name, job)
        assert events_of(folder / name)[-1]["event"] == "task_completed"
