"""What the journal of a task says of kernels that are compiled before its first step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny import make_task, read_journal, run_task

from alto.executor import beginning
from alto.executor.trainer import Trainer
from alto.runs import RunDir
from alto.spec import JobConfig

SPACE = {"lr": [1e-3], "lora_dropout": [0.0, 0.1], "optim": ["sgd"], "batch_size": [8]}


def events_of(folder: Path) -> list[dict[str, Any]]:
    task = make_task(folder, search_space=SPACE, num_train_epochs=1)
    run_dir = RunDir.create(folder / "run", task)
    run_task(task, run_dir)
    return read_journal(run_dir.root)


@pytest.mark.parametrize(("every_s", "expected"), [(0.0, [0, 1, 2, 3, 4]), (math.inf, [0, 4])])
def test_it_says_how_far_they_are_before_the_base_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_s: float, expected: list[int]
) -> None:
    asked: list[list[tuple[float, str]]] = []

    def compile_kernels(trainer: Trainer, configs: Sequence[JobConfig]) -> Iterator[tuple[int, int]]:
        asked.append([(config.lora_dropout, config.optim) for config in configs])
        return iter([(done, 4) for done in range(5)])

    monkeypatch.setattr(Trainer, "compile_kernels", compile_kernels)
    monkeypatch.setattr(beginning, "_REPORT_EVERY_S", every_s)
    events = events_of(tmp_path)
    assert asked == [[(0.0, "sgd"), (0.1, "sgd")]]
    found = [event for event in events if event["event"] == "kernels_compiled"]
    assert events[1 : 1 + len(found)] == found, "after task_started, before base_evaluated"
    assert [(event["done"], event["total"]) for event in found] == [(done, 4) for done in expected]
    durations = [event["duration_s"] for event in found]
    assert durations == sorted(durations)


def test_where_nothing_is_compiled_it_says_nothing(tmp_path: Path) -> None:
    assert not any(event["event"] == "kernels_compiled" for event in events_of(tmp_path))
