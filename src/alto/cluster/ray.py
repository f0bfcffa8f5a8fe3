"""Executors on a Ray cluster: a placement group and an actor each. The only module that uses Ray's interface."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from alto.cluster.base import ClusterEvent, ExecutorEnded, GpuCame, GpuGone, Launch, Outcome
from alto.cluster.launches import check_launch
from alto.cluster.local_executor import Timeouts
from alto.cluster.ray_nodes import RayNodes, slot_resource
from alto.errors import ClusterLostError, SpecError, UnsupportedError
from alto.records import Node

try:
    import ray
    from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RaySystemError, RpcError
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError:
    raise UnsupportedError('a Ray cluster needs the package ray, found none; pip install "alto-lora[ray]"') from None

from alto.cluster.ray_starter import Starter

__all__ = ["RayCluster"]

OLDEST = (2, 50)

TICK_S = 1.0
"""How often nodes are listed, and how long an actor waits for an event before it answers without one."""

NODE_VERDICT_S = 5.0
"""How long after an actor's death Ray may report the death of its node; only then is the executor reported as lost, so
that it is not started on that node again."""

HEAD_TIMEOUT_S = 30.0
"""How long the head may be unreachable, as during a restart. Ray itself would end this process after a minute."""

CLOSE_TIMEOUT_S = 30.0
"""How long actors may take to end their executors before they are killed themselves."""


@dataclass(slots=True, kw_only=True)
class _Running:
    """An executor, and the open request to its actor; None where a new request has to be sent.

    Attributes:
        died_because: Empty while its actor lives.
        watched_at: Time of its last check; after its actor has died, the time when that was found.
    """

    launch: Launch
    actor: Any
    group: PlacementGroup
    reply: Any = None
    num_heard: int = 0
    is_placed: bool = False
    silence_s: float = 0.0
    watched_at: float
    died_because: str = ""


class RayCluster:
    """Runs executors on the nodes of a Ray cluster that exists already, and leaves it running.

    Where no node has a GPU, CPU slots stand for GPUs: a slot is one CPU of Ray's. The numbers of GPUs only count here;
    which ones an executor gets Ray decides when it sets ``CUDA_VISIBLE_DEVICES``. An executor is on the first node of
    its launch; where the launch has more nodes, which one of several ranks must not, their GPUs are reserved with it.
    Every node needs ALTO, the same version, and sees the folders of runs at the same path.

    When an actor dies though its node lives, its executor saves and ends by itself; until then the lock of the run
    keeps another attempt waiting.

    Args:
        address: ``ray://HOST:PORT``, or ``auto`` for the cluster this process is connected to, ``RAY_ADDRESS`` names,
            or this machine belongs to.
        total_gpus: How many GPUs to use at most; None for all there are.
        heartbeat_timeout_s, start_timeout_s, drain_timeout_s: As of `LocalCluster`; an actor that is silent for
            ``heartbeat_timeout_s`` is hung too.
        placement_timeout_s: How long Ray may take to give a launch its GPUs (others may hold them) and an actor.

    Raises:
        SpecError: There is no Ray cluster at that address, or it has fewer GPUs.
        UnsupportedError: Ray is not installed, or too old.
    """

    def __init__(
        self,
        address: str = "auto",
        *,
        total_gpus: int | None = None,
        heartbeat_timeout_s: float = 300.0,
        start_timeout_s: float = 3600.0,
        drain_timeout_s: float = 120.0,
        placement_timeout_s: float = 300.0,
    ) -> None:
        _check_version(ray.__version__)
        self._timeouts = Timeouts(heartbeat_s=heartbeat_timeout_s, start_s=start_timeout_s, drain_s=drain_timeout_s)
        self._placement_timeout_s = placement_timeout_s
        self._running: dict[str, _Running] = {}
        self._is_ours = _connect(address)
        self._head = _head()
        self._head_seen_at = time.monotonic()
        self._is_lost = False
        table = ray.nodes()
        self._resource = slot_resource(table)
        self._nodes = RayNodes(self._resource, total_gpus)
        self._nodes.update(table)
        self._counted_at = time.monotonic()
        if total_gpus is not None and self._nodes.num_gpus < total_gpus:
            found = self._nodes.num_gpus
            self.close()
            raise SpecError(
                f"total_gpus: expected at most the {found} {self._resource}s of the Ray cluster, found {total_gpus}; "
                "ask for fewer, or add nodes with: ray start --address=..."
            )

    @property
    def nodes(self) -> Sequence[Node]:
        """The nodes with slots, as :meth:`poll` last found them."""
        return self._nodes.nodes

    @property
    def has_gpus(self) -> bool:
        """False where CPU slots stand for GPUs."""
        return self._resource == "GPU"

    def start(self, launch: Launch) -> None:
        """As `Cluster.start`; returns before Ray has placed it.

        Raises:
            ValueError: The task runs already, or a GPU is taken or is not in this cluster.
            ClusterLostError: The connection to Ray is lost.
        """
        check_launch(launch, self.nodes, [running.launch for running in self._running.values()])
        shares = Counter(gpu.node for gpu in launch.gpus)
        ids = [self._nodes.id_of(node) for node in shares]
        with self._connected():
            while not self._is_head_there():
                time.sleep(TICK_S)
            group = placement_group(
                [{self._resource: count} for count in shares.values()],
                strategy="STRICT_PACK" if len(shares) == 1 else "STRICT_SPREAD",
                bundle_label_selector=[{"ray.io/node-id": ray_id} for ray_id in ids],
            )
            num_gpus = shares[launch.gpus[0].node]
            actor = (
                ray.remote(Starter)
                .options(
                    num_gpus=num_gpus if self.has_gpus else 0,
                    num_cpus=0 if self.has_gpus else num_gpus,
                    max_restarts=0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
                )
                .remote(
                    launch,
                    has_gpus=self.has_gpus,
                    core_share=num_gpus / self._nodes.num_slots(launch.gpus[0].node),
                    timeouts=self._timeouts,
                )
            )
        self._running[launch.task] = _Running(launch=launch, actor=actor, group=group, watched_at=time.monotonic())

    def stop(self, task: str) -> None:
        """As `Cluster.stop`; raises `ClusterLostError` where the connection to Ray is lost."""
        if task in self._running:
            with self._connected():
                self._running[task].actor.stop.remote()

    def poll(self, timeout_s: float) -> list[ClusterEvent]:
        """As `Cluster.poll`; raises `ClusterLostError` where the connection to Ray is lost."""
        gives_up_at = time.monotonic() + timeout_s
        while True:
            with self._connected():
                told = [event for running in list(self._running.values()) for event in self._handle(running)]
                events = [*self._count_nodes(), *told, *self._lose_stranded(), *self._lose_dead()]
                left_s = gives_up_at - time.monotonic()
                if events or left_s <= 0:
                    return events
                self._wait(min(left_s, TICK_S))

    def close(self) -> None:
        """As `Cluster.close`; of Ray, only this process's connection ends.

        Where that was lost before, Ray ends the actors by itself and their executors save and end.
        """
        if self._is_lost or not ray.is_initialized():
            return
        closed = [running.actor.close.remote() for running in self._running.values()]
        if closed:
            ray.wait(closed, num_returns=len(closed), timeout=CLOSE_TIMEOUT_S)
        for task in list(self._running):
            self._release(task)
        if self._is_ours:
            ray.shutdown()

    def _wait(self, timeout_s: float) -> None:
        """Wait until an actor has answered, at most for ``timeout_s``."""
        replies = [running.reply for running in self._running.values() if running.reply is not None]
        if replies:
            ray.wait(replies, timeout=timeout_s)
        else:
            time.sleep(timeout_s)

    # -- the connection --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        """Translates a lost connection to Ray inside the block.

        Raises:
            ClusterLostError: There is none any more.
        """
        try:
            if not ray.is_initialized():  # or Ray would begin a cluster of its own, here
                raise ConnectionError("this process was disconnected")
            yield
        except (ConnectionError, RaySystemError, RpcError) as error:
            self._is_lost = True
            raise ClusterLostError(
                f"expected the Ray cluster to answer, found the connection lost ({_first_line(error)}); executors "
                "that still run save and end by themselves. Check that the cluster is up (ray status), then continue "
                "with: alto resume runs/queue-<id>"
            ) from error

    def _is_head_there(self) -> bool:
        """Whether the head is reachable: while it is not, Ray's own calls do not return."""
        if self._head is None:
            return True
        try:
            socket.create_connection(self._head, timeout=TICK_S).close()
        except OSError as error:
            if time.monotonic() > self._head_seen_at + HEAD_TIMEOUT_S:
                raise ConnectionError(
                    f"no head at {self._head[0]}:{self._head[1]} for {HEAD_TIMEOUT_S:.0f} s"
                ) from error
            return False
        self._head_seen_at = time.monotonic()
        return True

    # -- executors -------------------------------------------------------------------------------------------------

    def _handle(self, running: _Running) -> Iterator[ClusterEvent]:
        """Handle an actor's answer and send the next request."""
        if running.died_because:
            return
        if running.reply is not None:
            if not ray.wait([running.reply], timeout=0)[0]:
                yield from self._check_silence(running)
                return
            try:
                events = ray.get(running.reply)
            except ActorUnavailableError:
                # The connection broke. Either it comes back, or Ray finds out that the actor or its node is dead.
                running.reply = None
                yield from self._check_silence(running)
                return
            except RayError as error:
                if isinstance(error, ActorDiedError) and error.actor_init_failed:
                    yield self._end(running, Outcome.FAILED, _why_it_cannot_start(running.launch, error))
                    return
                running.reply = None
                running.died_because, running.watched_at = f"its actor ended: {_first_line(error)}", time.monotonic()
                return
            yield from events
            running.num_heard += len(events)
            running.is_placed = True
            running.silence_s, running.watched_at = 0.0, time.monotonic()
            if any(isinstance(event, ExecutorEnded) for event in events):
                self._release(running.launch.task)
                return
        running.reply = running.actor.poll.remote(running.num_heard, TICK_S)

    def _check_silence(self, running: _Running) -> Iterator[ExecutorEnded]:
        now = time.monotonic()
        # While this process was itself stopped or busy, it could not see any sign of life.
        running.silence_s += min(now - running.watched_at, 2 * TICK_S)
        running.watched_at = now
        if running.is_placed and running.silence_s > self._timeouts.heartbeat_s:
            yield self._end(running, Outcome.LOST, f"hung: no sign of life of its actor for {running.silence_s:.0f} s")
        elif not running.is_placed and running.silence_s > self._placement_timeout_s:
            yield self._end(
                running,
                Outcome.LOST,
                f"Ray did not start it within {self._placement_timeout_s:.0f} s; others may hold its "
                f"{self._resource}s, see: ray status",
            )

    def _end(self, running: _Running, outcome: Outcome, reason: str) -> ExecutorEnded:
        self._release(running.launch.task)
        return ExecutorEnded(task=running.launch.task, attempt=running.launch.attempt, outcome=outcome, reason=reason)

    def _release(self, task: str) -> None:
        """Kill the actor and release its GPUs to Ray."""
        running = self._running.pop(task)
        ray.kill(running.actor)
        remove_placement_group(running.group)

    # -- nodes -----------------------------------------------------------------------------------------------------

    def _count_nodes(self) -> list[GpuGone | GpuCame]:
        if time.monotonic() < self._counted_at + TICK_S or not self._is_head_there():
            return []
        changes = self._nodes.update(ray.nodes())
        self._counted_at = time.monotonic()
        return changes

    def _lose_stranded(self) -> Iterator[ExecutorEnded]:
        """Executors that had a GPU on a node that is gone."""
        for running in list(self._running.values()):
            gone = sorted({gpu.node for gpu in running.launch.gpus if self._nodes.id_of(gpu.node) is None})
            if gone:
                yield self._end(running, Outcome.LOST, f"{', '.join(gone)} left the cluster")

    def _lose_dead(self) -> Iterator[ExecutorEnded]:
        """Executors whose actor died a while ago, on a node that lives."""
        for running in list(self._running.values()):
            if running.died_because and time.monotonic() > running.watched_at + NODE_VERDICT_S:
                yield self._end(running, Outcome.LOST, running.died_because)


def _check_version(version: str) -> None:
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise UnsupportedError(
            f"expected Ray {OLDEST[0]}.{OLDEST[1]} or newer, found {version}; "
            'pip install --upgrade "alto-lora[ray]", on every node'
        )


def _connect(address: str) -> bool:
    """Connect to a cluster; returns whether the connection is this call's own."""
    if address == "auto" and ray.is_initialized():
        return False
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise SpecError(
            f"cluster: expected a Ray cluster at {address!r}, found none ({_first_line(error)}); "
            "start one with: ray start --head, or give its address as ray://HOST:10001"
        ) from error
    finally:
        # Ray's own would end this process where it is; what runs is to be drained.
        if signal.getsignal(signal.SIGTERM) is not before:
            signal.signal(signal.SIGTERM, before)
    return True


def _head() -> tuple[str, int] | None:
    """Address of the head; None where this process connects through a client server, which reports the head's end."""
    if ray.util.client.ray.is_connected():
        return None
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    return host.strip("[]"), int(port)


def _why_it_cannot_start(launch: Launch, error: ActorDiedError) -> str:
    cause = str(error).strip().splitlines()[-1].strip()
    return (
        f"expected ALTO on every node, the same version, found that {launch.gpus[0].node} cannot start it ({cause}); "
        'pip install "alto-lora[ray]" there, into the environment of its Ray'
    )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
