"""Nodes as Ray tells them, without Ray."""

from __future__ import annotations

from typing import Any

import pytest

from alto.cluster import GpuCame, GpuGone
from alto.cluster.ray_nodes import RayNodes, slot_resource
from alto.records import Gpu


def row(ray_id: str, *, alive: bool = True, host: str = "host", **resources: float) -> dict[str, Any]:
    return {"NodeID": ray_id * 8, "Alive": alive, "NodeManagerHostname": host, "Resources": resources}


def test_cpus_are_slots_only_where_no_node_has_a_gpu() -> None:
    head, gpu_node = row("a", CPU=8), row("b", CPU=8, GPU=2)
    assert slot_resource([head]) == "CPU"
    assert slot_resource([head, gpu_node]) == "GPU"
    assert slot_resource([head, {**gpu_node, "Alive": False}]) == "CPU"


def test_only_living_nodes_with_slots_take_part() -> None:
    nodes = RayNodes("GPU", None)
    nodes.update([row("a", CPU=8), row("b", GPU=2), row("c", GPU=1.5), row("d", alive=False, GPU=8)])
    assert [(node.name, node.gpus) for node in nodes.nodes] == [("host-bbbbbbbb", (0, 1)), ("host-cccccccc", (0,))]
    assert nodes.id_of("host-bbbbbbbb") == "b" * 8
    assert nodes.id_of("host-dddddddd") is None


def test_what_came_and_went_is_told_once() -> None:
    nodes = RayNodes("GPU", None)
    first, second = row("a", GPU=2), row("b", GPU=1)
    nodes.update([first])
    assert nodes.update([first]) == []
    gone = [GpuGone(gpu=Gpu("host-aaaaaaaa", index)) for index in (0, 1)]
    came = [GpuCame(gpu=Gpu("host-bbbbbbbb", 0))]
    assert nodes.update([{**first, "Alive": False}, second]) == [*gone, *came]
    assert nodes.update([second]) == []


@pytest.mark.parametrize(("total_gpus", "used"), [(1, [1]), (3, [2, 1]), (9, [2, 2])])
def test_no_more_gpus_are_used_than_asked_for(total_gpus: int, used: list[int]) -> None:
    nodes = RayNodes("GPU", total_gpus)
    nodes.update([row("a", GPU=2), row("b", GPU=2)])
    assert [len(node.gpus) for node in nodes.nodes] == used
    assert nodes.num_slots("host-aaaaaaaa") == 2


def test_a_node_that_comes_takes_the_place_of_one_that_went() -> None:
    nodes = RayNodes("GPU", 2)
    nodes.update([row("a", GPU=2), row("b", GPU=2)])
    assert [node.name for node in nodes.nodes] == ["host-aaaaaaaa"]
    nodes.update([row("b", GPU=2)])
    assert [node.name for node in nodes.nodes] == ["host-bbbbbbbb"]
