"""An estimate holds for its task, its rows and its cluster, and for no other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from tiny import make_task, write_rows

from alto.cluster import Cluster
from alto.engine.estimates import base_key, known_estimate, remember_duration, remember_estimate
from alto.records import Node, Sharing, TaskEstimate

pytestmark = pytest.mark.usefixtures("empty_cache")


@dataclass
class Machines:
    nodes: tuple[Node, ...] = (Node(name="a", gpus=(0, 1)),)
    has_gpus: bool = False


CLUSTER = cast(Cluster, Machines())
SHARING = Sharing(base="m", step_s=2.0, num_slots=4, slot_bytes=10, pass_bytes=100, capacity_bytes=1000)
ESTIMATE = TaskEstimate(duration_s=12.5, sharing=SHARING)


def test_known_under_any_name_once_remembered(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    assert known_estimate(task, CLUSTER, 1) is None
    remember_estimate(task, CLUSTER, 1, ESTIMATE)
    assert known_estimate(task, CLUSTER, 1) == ESTIMATE
    assert known_estimate(task.replace(name="other", priority=3), CLUSTER, 1) == ESTIMATE


@pytest.mark.parametrize(
    "changes",
    [
        {"num_train_epochs": 6},
        {"tenant": "another"},
        {"search_space": {"r": [4]}},
        {"num_gpus": 2},
        {"early_exit": {"enabled": False}},
    ],
)
def test_unknown_for_another_task(tmp_path: Path, changes: dict[str, Any]) -> None:
    task = make_task(tmp_path)
    remember_estimate(task, CLUSTER, 1, ESTIMATE)
    assert known_estimate(task.replace(**changes), CLUSTER, 1) is None


def test_unknown_for_other_rows_in_the_same_file(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    remember_estimate(task, CLUSTER, 1, ESTIMATE)
    write_rows(tmp_path / "train.jsonl", 99)
    assert known_estimate(task, CLUSTER, 1) is None


def test_known_for_the_same_rows_in_another_place(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    remember_estimate(task, CLUSTER, 1, ESTIMATE)
    other = tmp_path / "elsewhere.jsonl"
    other.write_bytes((tmp_path / "train.jsonl").read_bytes())
    assert known_estimate(task.replace(dataset=str(other)), CLUSTER, 1) == ESTIMATE
    assert known_estimate(task.replace(validation_dataset=str(other)), CLUSTER, 1) is None
    parts = [{"path": str(path), "weight": 1.0} for path in (tmp_path / "train.jsonl", other)]
    assert known_estimate(task.replace(dataset=parts), CLUSTER, 1) is None


def test_what_a_task_has_taken_is_known(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    remember_duration(task, CLUSTER, 1, 30.0)
    assert known_estimate(task, CLUSTER, 1) == TaskEstimate(duration_s=30.0)
    remember_estimate(task, CLUSTER, 1, ESTIMATE)
    for changes in ({}, {"share_executor": False}):
        remember_duration(task.replace(**changes), CLUSTER, 1, 30.0)
        assert known_estimate(task, CLUSTER, 1) == TaskEstimate(duration_s=30.0, sharing=SHARING)
    remember_duration(task, CLUSTER, 1, 1.0)
    found = known_estimate(task, CLUSTER, 1)
    assert found is not None
    assert found.sharing is not None
    assert found.sharing.step_s == 1.0, "the estimate includes steps"
    remember_duration(task, CLUSTER, 1, 0.0)
    assert known_estimate(task, CLUSTER, 1) is not None


@pytest.mark.parametrize("other", [Machines(nodes=(Node(name="a", gpus=(0,)),)), Machines(has_gpus=True)])
def test_unknown_on_another_cluster(tmp_path: Path, other: Machines) -> None:
    task = make_task(tmp_path)
    remember_estimate(task, CLUSTER, 1, ESTIMATE)
    assert known_estimate(task, cast(Cluster, other), 1) is None


def test_unknown_for_another_number_of_processes(tmp_path: Path) -> None:
    task = make_task(tmp_path, num_gpus=2)
    remember_estimate(task, CLUSTER, 2, ESTIMATE)
    assert known_estimate(task, CLUSTER, 1) is None
    assert known_estimate(task, CLUSTER, 2) == ESTIMATE


@pytest.mark.parametrize("duration_s", [0, 1e-9, -1.0, 1e13, "long", True])
def test_a_damaged_entry_is_measured_again(tmp_path: Path, duration_s: Any) -> None:
    task = make_task(tmp_path)
    remember_estimate(task, CLUSTER, 1, TaskEstimate(duration_s=duration_s))
    with pytest.warns(UserWarning, match="is damaged .invalid estimate: .*; it is discarded"):
        assert known_estimate(task, CLUSTER, 1) is None
    remember_estimate(task, CLUSTER, 1, ESTIMATE)
    assert known_estimate(task, CLUSTER, 1) == ESTIMATE


def test_a_task_that_may_not_share_takes_as_long(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    remember_estimate(task, CLUSTER, 1, ESTIMATE)
    alone = known_estimate(task.replace(share_executor=False), CLUSTER, 1)
    assert alone == TaskEstimate(duration_s=12.5, sharing=None)


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"gradient_checkpointing": True}, {"model": "other"}])
def test_tasks_with_the_same_base_have_the_same_key(tmp_path: Path, changes: dict[str, Any]) -> None:
    task = make_task(tmp_path)
    assert base_key(task) == base_key(task.replace(name="other", num_train_epochs=9, search_space={"r": [2]}))
    assert base_key(task) != base_key(task.replace(**changes))
