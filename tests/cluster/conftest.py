"""Fixtures that start clusters of every kind with the executors that a test wants."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from clusters import CLUSTERS, Started
from ray_machine import RayMachine, ray_machine

from alto.cluster import Cluster


@pytest.fixture(autouse=True)
def _entries_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let executors import ``cluster_hosts`` by the path that they inherit."""
    support = str(Path(__file__).parents[1] / "support")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([support, os.environ.get("PYTHONPATH", "")]))


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[RayMachine]:
    """A Ray cluster, which ends with the file because it takes memory and CPU time even when idle: a head
    without slots and two nodes of two slots; this process is connected to it."""
    with ray_machine() as machine:
        machine.add_node()
        machine.add_node()
        yield machine


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.slow("ray"))])
def start_cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """``start_cluster(host, num_gpus=1, **timeouts)``: executors run that host of ``cluster_hosts``."""
    if request.param == "ray":
        request.getfixturevalue("ray_nodes")
    clusters: list[Cluster] = []

    def start(host: str, num_gpus: int = 1, **timeouts: float) -> Started:
        clusters.append(CLUSTERS[request.param](num_gpus, **timeouts))
        return Started(clusters[-1], tmp_path, host)

    yield start
    for cluster in clusters:
        cluster.close()
