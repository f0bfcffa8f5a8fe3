"""A cache of measured task durations, so that scheduling the same tasks again starts no executor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from alto.cluster import Cluster
from alto.executor import cache
from alto.records import MAX_DURATION_S, MIN_DURATION_S
from alto.spec import Task
from alto.spec.outside import is_number

__all__ = ["known_duration_s", "remember_duration_s"]

_SCHEDULING = ("name", "priority", "tenant", "report_to")
"""Keys of a task that do not affect its duration."""


def known_duration_s(task: Task, cluster: Cluster, num_ranks: int) -> float | None:
    """Measured duration of the task in seconds, on such a cluster with so many processes; None where none is cached.

    Args:
        task: The task.
        cluster: The cluster that it is trained on.
        num_ranks: Number of processes that train it.
    """
    key = _key(task, cluster, num_ranks)
    found = cache.load("durations", key)
    if found is None:
        return None
    if is_number(found, least=MIN_DURATION_S, most=MAX_DURATION_S):
        return float(found)
    cache.discard("durations", key, f"a duration of {found!r:.40}")
    return None


def remember_duration_s(task: Task, cluster: Cluster, num_ranks: int, duration_s: float) -> None:
    """Cache the duration that an executor on ``cluster`` has measured.

    Args:
        task: The task.
        cluster: The cluster that it is trained on.
        num_ranks: Number of processes that train it.
        duration_s: Measured duration, in seconds.
    """
    cache.save("durations", _key(task, cluster, num_ranks), duration_s)


def _key(task: Task, cluster: Cluster, num_ranks: int) -> Mapping[str, Any]:
    files = [path for path in (task.dataset, task.validation_dataset) if path is not None]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{len(os.sched_getaffinity(0))} cores"
    return {
        "task": {key: value for key, value in task.to_dict().items() if key not in _SCHEDULING},
        "files": [_state_of(Path(path).expanduser()) for path in files],
        "weights": cache.weights_of(task.model),
        "nodes": [len(node.gpus) for node in cluster.nodes],
        "has_gpus": cluster.has_gpus,
        "ranks": num_ranks,
        "device": device,
        "versions": cache.versions(),
    }


def _state_of(path: Path) -> tuple[int, int] | None:
    """Size and modification time of a local file; None for anything else."""
    if not path.is_file():
        return None
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
