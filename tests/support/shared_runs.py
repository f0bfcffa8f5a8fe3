"""Tasks on one base model, and one process that trains them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from clusters import LIMIT_S, Started
from tiny import curves_of, make_task, read_journal

from alto.cluster import Cluster, EntryWritten
from alto.engine.estimates import base_key
from alto.engine.work import TRAIN
from alto.runs import RunDir
from alto.spec import Task

SPACE = {"lr": [1e-4, 3e-4], "lora_dropout": [0.1]}


def write_pairs(path: Path) -> Path:
    """Write 13 questions, with the better and the worse of two answers."""
    rows = [{"prompt": f"{n} and {n}?", "chosen": f" {n + n}.", "rejected": f" {n} {n}, no?"} for n in range(13)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def shared_tasks(model: Path, folder: Path, **changes: Any) -> dict[str, Task]:
    """Return tasks with two methods, ranks, datasets and numbers of epochs, on one base."""
    folders = {name: folder / name for name in ("alder", "birch", "cedar")}
    for own in folders.values():
        own.mkdir()
    common: dict[str, Any] = {
        "model": str(model),
        "max_tokens_per_pass": 4096,
        "early_exit": {"enabled": False},
        "eval_steps": 0.25,
        "report_to": "none",
        **changes,
    }
    pairs = {key: str(write_pairs(folders["birch"] / f"{key}.jsonl")) for key in ("dataset", "validation_dataset")}
    return {
        "alder": make_task(folders["alder"], name="alder", search_space=SPACE, **common),
        "birch": make_task(folders["birch"], name="birch", method="dpo", search_space=SPACE, **common, **pairs),
        "cedar": make_task(
            folders["cedar"], name="cedar", search_space=SPACE | {"r": [4]}, num_train_epochs=2, **common
        ),
    }


class SharedRuns(Started):
    """One process of ``cluster`` that trains ``tasks``, whose runs are in ``folder``."""

    def __init__(self, cluster: Cluster, folder: Path, tasks: Mapping[str, Task]) -> None:
        super().__init__(cluster, folder, "")
        self.tasks = tasks
        self.roots: dict[str, Path] = {}
        self.attached: Sequence[str] = ()

    def attach(self, name: str, attempt: int = 1) -> None:
        if name not in self.roots:
            self.roots[name] = self._folder / name
            RunDir(self.roots[name]).begin(self.tasks[name])
        self.start(
            name,
            run_dir=self.roots[name],
            attempt=attempt,
            host=TRAIN,
            executor="executor-1",
            base=base_key(self.tasks["alder"]),
        )

    def until_written(self, num_entries: int, attempt: int) -> bool:
        """Poll until an attempt at all tasks has written a number of lines; return False if all have ended before."""

        def found() -> str:
            if all(self.ended(name, attempt) for name in self.attached):
                return "ended"
            written = [e for e in self.events if isinstance(e, EntryWritten) and e.attempt == attempt]
            return "written" if len(written) >= num_entries else ""

        return bool(self._until(found, f"{num_entries} lines, in {LIMIT_S} s") == "written")

    @property
    def pid(self) -> int:
        (process,) = self.cluster._machine._pool._gpus  # type: ignore[attr-defined]
        while process._group._first.pid is None:
            process.has_ended()
        return int(process._group._first.pid)

    def files(self, name: str) -> dict[str, bytes]:
        root = self.roots[name]
        return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def assert_as_alone(root: str | Path, alone: str | Path) -> None:
    """Check for the same curves, and the same winner."""
    found, expected = (curves_of(read_journal(run)) for run in (root, alone))
    assert found.keys() == expected.keys()
    for job, curve in expected.items():
        assert found[job].train == pytest.approx(curve.train, rel=1e-4), job
        assert found[job].validation == pytest.approx(curve.validation, rel=1e-4), job
    results = [json.loads((Path(run) / "best" / "metrics.json").read_text("utf-8")) for run in (root, alone)]
    assert results[0]["job"] == results[1]["job"]
