"""Opens the cluster at the address that the user gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias, cast

from alto.base import Registry, naming_errors
from alto.cluster.base import AttemptEnded, Cluster, ClusterEvent, EntryWritten, GpuAdded, GpuLost, Launch, Outcome
from alto.errors import SpecError, UnsupportedError
from alto.records import Node

PAGE = "docs/clusters.md"

_MEMBERS = ("nodes", "has_gpus", "start", "stop", "poll", "close")

_NOTHING = object()


class CheckedCluster:
    """A wrapper around ``cluster`` that names its errors and checks its events.

    Raises:
        UnsupportedError: The object is not a cluster, or its ``nodes`` are invalid. Every method raises it if the
            cluster raises an error that is not ALTO's, or violates the contract of `Cluster`.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._name = type(cluster).__name__
        self._attempts: dict[str, int] = {}
        """The running attempt at each task that has one."""
        missing = [member for member in _MEMBERS if inspect.getattr_static(cluster, member, _NOTHING) is _NOTHING]
        if missing:
            raise UnsupportedError(
                f"cluster: expected the object that the package opens, {self._name}, to have the methods and "
                f"properties of alto.cluster.Cluster, found it without {', '.join(missing)}; fix the cluster plugin "
                f"(see {PAGE})"
            )
        nodes = self.nodes
        if not any(node.gpus for node in nodes) or len({node.name for node in nodes}) < len(nodes):
            raise self._broken("nodes", "machines with different names and at least one GPU or CPU slot", repr(nodes))

    @property
    def nodes(self) -> Sequence[Node]:
        """The machines, as of now."""
        with self._naming_errors("nodes"):
            nodes = self._cluster.nodes
        if not isinstance(nodes, Sequence) or not all(isinstance(node, Node) for node in nodes):
            raise self._broken("nodes", "a sequence of alto.records.Node", repr(nodes))
        return nodes

    @property
    def has_gpus(self) -> bool:
        """False if CPU slots are used instead of GPUs."""
        with self._naming_errors("has_gpus"):
            return self._cluster.has_gpus

    def start(self, launch: Launch) -> None:
        """Start an executor."""
        with self._naming_errors("start"):
            self._cluster.start(launch)
        self._attempts[launch.task] = launch.attempt

    def stop(self, task: str) -> None:
        """Ask a running executor to save and stop."""
        with self._naming_errors("stop"):
            self._cluster.stop(task)

    def poll(self, timeout_s: float) -> list[ClusterEvent]:
        """Return the events since the last call, after checking that each belongs to a running attempt."""
        with self._naming_errors("poll"):
            events = self._cluster.poll(timeout_s)
        if not isinstance(events, list):
            raise self._broken("poll", "a list of events", type(events).__name__)
        for event in events:
            self._check_event(event)
        return events

    def close(self) -> None:
        """Kill running executors."""
        with self._naming_errors("close"):
            self._cluster.close()

    def _check_event(self, event: object) -> None:
        if isinstance(event, GpuLost | GpuAdded):
            return
        if not isinstance(event, EntryWritten | AttemptEnded):
            raise self._broken("poll", "events of alto.cluster", type(event).__name__)
        if isinstance(event, AttemptEnded) and not isinstance(event.outcome, Outcome):
            raise self._broken("poll", "an outcome of alto.cluster.Outcome", repr(event.outcome))
        attempt = self._attempts.get(event.task)
        if event.attempt != attempt:
            runs = "no attempt" if attempt is None else f"attempt {attempt}"
            found = f"{type(event).__name__} of attempt {event.attempt} at task {event.task!r}, while {runs} is running"
            raise self._broken("poll", "events of attempts that were started and have not ended", found)
        if isinstance(event, AttemptEnded):
            del self._attempts[event.task]

    def _broken(self, member: str, expected: str, found: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self._name}.{member}: expected {expected}, found {found}; fix the cluster plugin (see {PAGE})"
        )

    def _naming_errors(self, member: str) -> AbstractContextManager[None]:
        return naming_errors(f"{self._name}.{member}", type(self._cluster).__module__, page=PAGE)


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
