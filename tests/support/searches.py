"""Tasks with a search that adds jobs while others train, on a small model in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from resident_jobs import DATA, make_model
from shared_executor import built
from transformers import PreTrainedModel

from alto.backbone import Backbone
from alto.data import TaskData
from alto.early_exit import audit
from alto.errors import TaskInterruptedError
from alto.executor import Executor, Hooks, TaskSession
from alto.runs import read_entries, read_events
from alto.spec import Task

_LLAMA = partial(make_model, "llama")
SPACE = {"lr": {"min": 1e-5, "max": 1e-2, "log": True}, "r": [2, 4, 8], "batch_size": [4, 7]}
TPE = {"algorithm": "tpe", "num_initial_jobs": 4, "budget": {"jobs": 12}}
PBT = {"algorithm": "pbt", "num_initial_jobs": 4, "interval": 0.2, "exchanged": 0.25}


def make(search: dict[str, Any], **changes: Any) -> Task:
    settings = {
        "model": "unused",
        "dataset": "unused.jsonl",
        "name": "searched",
        "max_slots": 4,
        "max_tokens_per_pass": 400,
        "num_train_epochs": 3,
        "eval_steps": 0.25,
        "search": search,
        "search_space": SPACE,
        "keep": "all",
    }
    return Task(**{**settings, **changes})


class KilledError(Exception):
    """Raised to end a run at once: everything that it has not saved is lost."""


class Run:
    """One run of a task, in this process.

    Args:
        folder: Folder of the run.
        model: Makes the base model.
        data: Rows of the task.
        clock: Returns the time against which its budget is measured.
    """

    def __init__(
        self,
        folder: Path,
        task: Task,
        *,
        model: Callable[[], PreTrainedModel] = _LLAMA,
        data: TaskData = DATA,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self._clock = clock
        self.task = task
        self._model = model
        self._data = data

    def train(self, turns: int | None = None, *, is_killed: bool = False) -> Run:
        """Train to the end, or for a number of turns, after which the run is stopped and saved, or killed."""
        left = [turns]

        def is_interrupted() -> bool:
            if left[0] is None:
                return False
            left[0] -= 1
            if is_killed and left[0] < 0:
                raise KilledError
            return left[0] < 0

        from alto.executor.planned_job import resolve_rungs

        task = resolve_rungs(self.task, len(self._data.train))
        backbone = Backbone(self._model(), None, "unused")
        hooks = Hooks(is_interrupted=is_interrupted, clock=self._clock)
        with built(self.folder, task, self._data, backbone, hooks=hooks) as session:
            if turns is None:
                self.finish(session)
            else:
                with pytest.raises(KilledError if is_killed else TaskInterruptedError):
                    self.finish(session)
        return self

    def finish(self, session: TaskSession) -> None:
        executor = Executor(session.bank)
        executor.attach("run", session)
        ended: dict[str, Exception | None] = {}
        while not ended:
            ended = executor.turn()
        if ended["run"] is not None:
            raise ended["run"]

    @property
    def root(self) -> Path:
        (root,) = self.folder.iterdir()
        return root

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.root / "journal.jsonl") if not kinds or event["event"] in kinds]

    def added(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in event.items() if key not in ("seq", "time")}
            for event in self.events("job_added")
        ]

    def assert_decided_as_journalled(self) -> None:
        assert audit(read_entries(self.root / "journal.jsonl")) == ()


def begun(session: TaskSession, turns: int) -> None:
    executor = Executor(session.bank)
    executor.attach("run", session)
    for _ in range(turns):
        executor.turn()
