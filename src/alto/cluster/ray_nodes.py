"""Nodes of a Ray cluster for the queue: names, slots, and changes. Reads Ray's node table without importing Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from alto.cluster.base import GpuAdded, GpuLost
from alto.records import Gpu, Node

Table = Sequence[Mapping[str, Any]]
"""The return type of ``ray.nodes()``."""


def slot_resource(table: Table) -> str:
    """Return the resource that a slot of this cluster is: ``GPU``, or ``CPU`` if no node has a GPU."""
    return "GPU" if any(_num_slots(row, "GPU") for row in table) else "CPU"


class RayNodes:
    """The nodes of a Ray cluster that are used.

    Ray numbers the GPUs of a node itself when it assigns them; the GPU numbers here only count slots.

    Args:
        resource: Returned by :func:`slot_resource`.
        total_gpus: Maximum number of slots to use; None for all.
    """

    def __init__(self, resource: str, total_gpus: int | None) -> None:
        self._resource = resource
        self._total_gpus = total_gpus
        self._nodes: dict[str, Node] = {}
        self._num_slots: dict[str, int] = {}

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self._nodes.values())

    @property
    def num_gpus(self) -> int:
        return sum(len(node.gpus) for node in self.nodes)

    def id_of(self, name: str) -> str | None:
        """Return Ray's id of the node ``name``; None if the cluster does not have it."""
        return next((ray_id for ray_id, node in self._nodes.items() if node.name == name), None)

    def num_slots(self, name: str) -> int:
        """Return the number of all slots of a node, including those not used here."""
        return self._num_slots[name]

    def update(self, table: Table) -> list[GpuLost | GpuAdded]:
        """Update the nodes from Ray's node table; return the changes, losses first. If a node has slots beyond
        ``total_gpus``, they are used when others leave."""
        slots = {row["NodeID"]: _num_slots(row, self._resource) for row in table}
        gone = [ray_id for ray_id in self._nodes if not slots.get(ray_id)]
        lost = [gpu for ray_id in gone for gpu in _gpus(self._nodes.pop(ray_id))]
        came: list[Gpu] = []
        for row in table:
            before = self._nodes.get(row["NodeID"], Node(name=name_of(row), gpus=()))
            num_slots = slots[row["NodeID"]]
            if self._total_gpus is not None:
                num_slots = min(num_slots, len(before.gpus) + self._total_gpus - self.num_gpus)
            if num_slots > len(before.gpus):
                node = Node(name=before.name, gpus=tuple(range(num_slots)))
                self._nodes[row["NodeID"]] = node
                self._num_slots[node.name] = slots[row["NodeID"]]
                came += _gpus(node)[len(before.gpus) :]
        return [*(GpuLost(gpu=gpu) for gpu in lost), *(GpuAdded(gpu=gpu) for gpu in came)]


def has_slots(row: Mapping[str, Any]) -> bool:
    """Return whether a node can run tasks, on GPUs or CPU slots."""
    return bool(_num_slots(row, "GPU") or _num_slots(row, "CPU"))


def is_head(row: Mapping[str, Any]) -> bool:
    """Return whether a living node is the head of the cluster."""
    return bool(row["Alive"]) and "node:__internal_head__" in row["Resources"]


def name_of(row: Mapping[str, Any]) -> str:
    """Return the name of a node. Several nodes may share a host, and Ray gives a node that comes back a new id."""
    return f"{row['NodeManagerHostname']}-{row['NodeID'][:8]}"


def version_problem(node: str, expected: Mapping[str, str | None], found: Mapping[str, str | None]) -> str:
    """Return why a node cannot be used; empty if its packages have the expected versions.

    Labels of local builds (``+cpu``, ``+cu128``) may differ, because a server without GPUs may lead nodes with GPUs.
    """
    wrong = [package for package in expected if _public(expected[package]) != _public(found.get(package))]
    if not wrong:
        return ""
    expects, finds = (
        " and ".join(f"{package} {versions.get(package) or '(not installed)'}" for package in wrong)
        for versions in (expected, found)
    )
    pins = " ".join(f"'{package}=={_public(expected[package])}'" for package in wrong)
    return (
        f"node {node}: expected {expects}, as in the process that starts tasks, found {finds}; in the Python "
        f"environment of Ray on this node: pip install {pins}"
    )


def _public(version: str | None) -> str | None:
    return version and version.partition("+")[0]


def _num_slots(row: Mapping[str, Any], resource: str) -> int:
    return int(row["Resources"].get(resource, 0)) if row["Alive"] else 0


def _gpus(node: Node) -> list[Gpu]:
    return [Gpu(node.name, index) for index in node.gpus]
