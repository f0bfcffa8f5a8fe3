"""Checks of launches for all clusters."""

from __future__ import annotations

from collections.abc import Iterable

from alto.cluster.base import Launch
from alto.records import Gpu, Node

__all__ = ["check_launch"]


def check_launch(launch: Launch, nodes: Iterable[Node], running: Iterable[Launch]) -> None:
    """Raise ValueError if the task already runs, or a GPU of the launch is taken or is not on one of ``nodes``.

    Args:
        running: Launches of running executors.
    """
    taken: set[Gpu] = set()
    for other in running:
        if other.task == launch.task:
            raise ValueError(f"task {launch.task!r}: expected a task that does not run, found that it runs")
        if launch.executor and other.executor == launch.executor:
            if other.gpus != launch.gpus or other.base != launch.base or launch.num_ranks > 1:
                raise ValueError(
                    f"task {launch.task!r}: expected the GPUs and the base model of {launch.executor!r}, which it "
                    f"shares, {list(other.gpus)} and {other.base!r}, found {list(launch.gpus)} and {launch.base!r}"
                )
            continue
        taken.update(other.gpus)
    free = {Gpu(node.name, index) for node in nodes for index in node.gpus} - taken
    if not launch.gpus or len(set(launch.gpus)) != len(launch.gpus) or not set(launch.gpus) <= free:
        raise ValueError(
            f"task {launch.task!r}: expected GPUs among the free ones, {sorted(free)}, found {list(launch.gpus)}"
        )
