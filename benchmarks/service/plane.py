"""The control plane of a service on simulated executors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from alto.cluster import Cluster
from alto.engine.control_plane import ControlPlane, opened_control_plane
from alto.engine.queue_setup import QueueSetup
from alto.service.context import control_folder, history_before
from alto.service.coordinator.coordinator import OpenPlane

__all__ = ["simulated_plane"]


@dataclass(frozen=True, kw_only=True)
class _Setup(QueueSetup):
    """A set-up that runs on a given cluster."""

    given: Cluster

    @contextlib.contextmanager
    def opened(self) -> Iterator[Cluster]:
        with contextlib.closing(self.given):
            yield self.given


def simulated_plane(
    root: Path,
    new_cluster: Callable[[], Cluster],
    *,
    strategy: str = "single",
    machines: Sequence[int] | None = None,
) -> OpenPlane:
    """Open a control plane on a new simulated cluster; ``root`` is the service's data folder."""

    def opened(epoch: int) -> contextlib.AbstractContextManager[ControlPlane]:
        setup = _Setup(strategy=strategy, cluster="simulated", total_gpus=None, quotas={}, given=new_cluster())
        folder, before = control_folder(root, epoch), history_before(root)
        return opened_control_plane(setup, folder, method="lpt", before=before, machines=machines)

    return opened
