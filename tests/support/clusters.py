"""Clusters of every kind for one suite of tests, and helpers of this suite."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alto.cluster import AttemptEnded, Cluster, ClusterEvent, EntryWritten, Launch, TaskTicket
from alto.cluster.local import LocalCluster
from alto.records import Gpu

LIMIT_S = 120.0


def local_cluster(num_gpus: int, **timeouts: float) -> Cluster:
    return LocalCluster(total_gpus=num_gpus, **timeouts)


def ray_cluster(num_gpus: int, **timeouts: float) -> Cluster:
    from alto.cluster.ray import RayCluster

    return RayCluster("auto", total_gpus=num_gpus, **timeouts)


CLUSTERS: dict[str, Callable[..., Cluster]] = {"local": local_cluster, "ray": ray_cluster}
"""Function that makes a cluster of ``num_gpus`` GPUs, or of slots in their place."""


class Started:
    """A cluster whose executors run one host, and its events so far. ``host`` is a class of
    ``cluster_hosts``, or of another module if that is named."""

    def __init__(self, cluster: Cluster, folder: Path, host: str) -> None:
        self.cluster = cluster
        self.host = host if ":" in host else f"cluster_hosts:{host}"
        self.events: list[ClusterEvent] = []
        self._folder = folder

    def run_dir(self, task: str) -> Path:
        """Return the folder of a run, in its state before the first attempt."""
        root = self._folder / task
        root.mkdir(exist_ok=True)
        (root / "journal.jsonl").touch()
        return root

    def gpus(self) -> list[Gpu]:
        return [Gpu(node.name, index) for node in self.cluster.nodes for index in node.gpus]

    def start(
        self,
        task: str = "a",
        *,
        gpus: tuple[int, ...] = (0,),
        attempt: int = 1,
        num_ranks: int = 1,
        run_dir: Path | None = None,
        trust_remote_code: bool = False,
        host: str = "",
        executor: str = "",
        **ticket: Any,
    ) -> Path:
        """Start a task on GPUs with these indices; return the folder of its run."""
        own = tuple(self.gpus()[index] for index in gpus)
        run_dir = run_dir or self.run_dir(task)
        self.cluster.start(
            Launch(
                ticket=TaskTicket(
                    task=task,
                    run_dir=str(run_dir),
                    host=host or self.host,
                    num_gpus=len(own),
                    is_parallel=num_ranks > 1,
                    trust_remote_code=trust_remote_code,
                    **ticket,
                ),
                gpus=own,
                attempt=attempt,
                executor=executor,
            )
        )
        return run_dir

    def lines_of(self, task: str = "a", attempt: int = 1) -> list[dict[str, Any]]:
        """Return the journal lines of a task so far."""
        return [
            event.entry.to_dict()
            for event in self.events
            if isinstance(event, EntryWritten) and (event.task, event.attempt) == (task, attempt)
        ]

    def until_event(self, name: str, task: str = "a", attempt: int = 1) -> dict[str, Any]:
        """Poll until a task has written the event ``name``; return its line."""
        return self._until(
            lambda: next((line for line in self.lines_of(task, attempt) if line["event"] == name), None),
            f"{task}: {name}",
        )

    def until_ended(self, task: str = "a", attempt: int = 1) -> AttemptEnded:
        """Poll until the executor of a task has ended."""
        return self._until(lambda: self.ended(task, attempt), f"the end of {task}")

    def poll(self) -> None:
        self.events += self.cluster.poll(0.5)

    def ended(self, task: str = "a", attempt: int = 1) -> AttemptEnded | None:
        """Return how the executor of a task has ended, as far as events have reported it."""
        ends = (event for event in self.events if isinstance(event, AttemptEnded))
        return next((end for end in ends if (end.task, end.attempt) == (task, attempt)), None)

    def _until(self, found: Callable[[], Any], what: str) -> Any:
        return wait_for(found, what, meanwhile=self.poll)


def wait_for(found: Callable[[], Any], what: str, meanwhile: Callable[[], None] = lambda: time.sleep(0.02)) -> Any:
    gives_up_at = time.monotonic() + LIMIT_S
    while not (result := found()):
        assert time.monotonic() < gives_up_at, f"waited for {what}"
        meanwhile()
    return result


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
