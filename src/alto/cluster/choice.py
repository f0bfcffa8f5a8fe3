"""Opens the cluster that the user names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, cast

from alto.cluster.base import Cluster
from alto.cluster.checked import CheckedCluster
from alto.errors import SpecError
from alto.spec.packages import naming_errors
from alto.spec.registry import Registry

__all__ = ["CLUSTERS", "OpenCluster", "open_cluster"]

OpenCluster: TypeAlias = Callable[[str, int | None], Cluster]
"""Opens a cluster, given its address and the maximum number of GPUs to use (None: all)."""


def _local(address: str, total_gpus: int | None) -> Cluster:
    from alto.cluster.local import LocalCluster

    return LocalCluster(total_gpus=total_gpus)


def _ray(address: str, total_gpus: int | None) -> Cluster:
    from alto.cluster.ray import RayCluster

    return RayCluster(address=address, total_gpus=total_gpus)


def _checked(found: object) -> OpenCluster:
    if not callable(found):
        raise SpecError(f"expected a function of an address and a number of GPUs, found {type(found).__name__}")
    return cast(OpenCluster, found)


CLUSTERS: Registry[OpenCluster] = Registry(
    group="alto.clusters",
    key="cluster",
    page="docs/clusters.md",
    own={"local": _local, "auto": _ray, "ray": _ray},
    check=_checked,
)
"""Cluster types by name: the part of the address before ``://``, or the whole address without ``://``."""


def open_cluster(address: str, *, total_gpus: int | None) -> Cluster:
    """Open the cluster at ``address``.

    Args:
        address: ``local``; ``auto`` or ``ray://HOST:PORT`` for a Ray cluster; ``NAME`` or ``NAME://…`` for a cluster
            type that an installed package registers as an entry point ``NAME`` of ``alto.clusters``.
        total_gpus: Maximum number of GPUs to use; None for all.

    Raises:
        SpecError: There is no such cluster type, or the cluster has fewer GPUs.
        UnsupportedError: Ray is not installed; or a package's entry point cannot be used, or opens no cluster.
    """
    if address == "ray":
        raise SpecError("cluster: expected auto or ray://HOST:PORT for a Ray cluster, found 'ray'; add its address")
    kind = address.partition("://")[0]
    CLUSTERS.check_not_taken(kind)
    opens = CLUSTERS.find(kind)
    if kind in CLUSTERS.own:
        return opens(address, total_gpus)
    module = getattr(opens, "__module__", None) or kind
    with naming_errors(f"the function that opens the cluster {kind!r}", module, page=CLUSTERS.page):
        cluster = opens(address, total_gpus)
    return CheckedCluster(cluster)
