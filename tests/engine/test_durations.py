"""How long a task takes is known for that task, those rows and that cluster, and for no other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from tiny import make_task, write_rows

from alto.cluster import Cluster
from alto.engine.durations import known_duration_s, remember_duration_s
from alto.records import Node


@dataclass
class Machines:
    nodes: tuple[Node, ...] = (Node(name="a", gpus=(0, 1)),)
    has_gpus: bool = False


CLUSTER = cast(Cluster, Machines())


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALTO_CACHE", str(tmp_path / "cache"))


def test_known_under_any_name_once_remembered(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    assert known_duration_s(task, CLUSTER, 1) is None
    remember_duration_s(task, CLUSTER, 1, 12.5)
    assert known_duration_s(task, CLUSTER, 1) == 12.5
    assert known_duration_s(task.replace(name="other", priority=3), CLUSTER, 1) == 12.5


@pytest.mark.parametrize(
    "changes",
    [{"num_train_epochs": 6}, {"search_space": {"r": [4]}}, {"num_gpus": 2}, {"early_exit": {"enabled": False}}],
)
def test_unknown_for_another_task(tmp_path: Path, changes: dict[str, Any]) -> None:
    task = make_task(tmp_path)
    remember_duration_s(task, CLUSTER, 1, 12.5)
    assert known_duration_s(task.replace(**changes), CLUSTER, 1) is None


def test_unknown_for_other_rows_in_the_same_file(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    remember_duration_s(task, CLUSTER, 1, 12.5)
    write_rows(tmp_path / "train.jsonl", 99)
    assert known_duration_s(task, CLUSTER, 1) is None


@pytest.mark.parametrize("other", [Machines(nodes=(Node(name="a", gpus=(0,)),)), Machines(has_gpus=True)])
def test_unknown_on_another_cluster(tmp_path: Path, other: Machines) -> None:
    task = make_task(tmp_path)
    remember_duration_s(task, CLUSTER, 1, 12.5)
    assert known_duration_s(task, cast(Cluster, other), 1) is None


def test_unknown_for_another_number_of_processes(tmp_path: Path) -> None:
    task = make_task(tmp_path, num_gpus=2)
    remember_duration_s(task, CLUSTER, 2, 12.5)
    assert known_duration_s(task, CLUSTER, 1) is None
    assert known_duration_s(task, CLUSTER, 2) == 12.5


@pytest.mark.parametrize("duration_s", [0, 1e-9, -1.0, 1e13, "long", True])
def test_a_damaged_entry_is_measured_again(tmp_path: Path, duration_s: Any) -> None:
    task = make_task(tmp_path)
    remember_duration_s(task, CLUSTER, 1, duration_s)
    with pytest.warns(UserWarning, match="is damaged .a duration of .*; it is discarded"):
        assert known_duration_s(task, CLUSTER, 1) is None
    remember_duration_s(task, CLUSTER, 1, 12.5)
    assert known_duration_s(task, CLUSTER, 1) == 12.5
