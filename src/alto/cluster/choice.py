"""The cluster a user names."""

from __future__ import annotations

from alto.cluster.base import Cluster
from alto.errors import SpecError

__all__ = ["open_cluster"]


def open_cluster(name: str, *, total_gpus: int | None) -> Cluster:
    """``local``; ``ray://HOST:PORT`` or ``auto`` for a Ray cluster.

    Args:
        total_gpus: How many to use at most; None for all there are.

    Raises:
        SpecError: There is no such kind of cluster, or it has fewer GPUs.
        UnsupportedError: Ray is not installed.
    """
    if name == "local":
        from alto.cluster.local import LocalCluster

        return LocalCluster(total_gpus=total_gpus)
    if name == "auto" or name.startswith("ray://"):
        from alto.cluster.ray import RayCluster

        return RayCluster(address=name, total_gpus=total_gpus)
    raise SpecError(f"cluster: expected local, auto or ray://HOST:PORT, found {name!r}")
