"""Executors on a Ray cluster: each has a placement group and an actor, for one task or for several that share it. This
is the only module that uses Ray's interface.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from alto.base import first_line
from alto.cluster.base import AttemptEnded, ClusterEvent, Ending, GpuAdded, GpuLost, Launch, Outcome, check_launch
from alto.cluster.executor_process import Timeouts
from alto.cluster.ray_nodes import RayNodes, Table, has_slots, is_head, name_of, slot_resource, version_problem
from alto.cluster.ray_starter import Starter
from alto.errors import ClusterLostError, ClusterVersionError, SpecError, UnsupportedError
from alto.records import Node
from alto.version import install_command, version_of

try:
    import ray
    from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RaySystemError, RpcError
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
except ImportError:
    raise UnsupportedError(f"a Ray cluster needs the package ray, found none; {install_command('ray')}") from None


OLDEST = (2, 50)

TICK_S = 1.0
"""Interval at which nodes are listed, and the longest wait of an actor for an event before it answers without one."""

NODE_VERDICT_S = 5.0
"""Time for Ray to report the death of an actor's node after the actor's death. Only then is the executor reported as
lost, so that it is not started on that node again."""

HEAD_TIMEOUT_S = 30.0
"""Longest time that the head may be unreachable, as in a restart. Ray itself would exit this process after a minute."""

CLOSE_TIMEOUT_S = 30.0
"""Time for actors to stop their executors before the actors themselves are killed."""


IDLE_TIMEOUT_S = 60.0
"""Time for which an actor without a task is kept. A later task can then use the base model in its process."""

PACKAGES = ("alto-lora", "torch")
"""Packages that must have the same version on all nodes as in this process. Ray itself compares the versions of Ray and
Python."""

VERSIONS_TIMEOUT_S = 60.0
"""Time for a node to report its versions; Ray may have to start a process for it."""

ASK_AGAIN_S = 60.0
"""Time after which a node with other versions is asked again, because it may have been upgraded."""

_LOG = logging.getLogger("alto.cluster")


@dataclass(slots=True, kw_only=True, eq=False)
class _Actor:
    """An actor on its GPUs.

    Attributes:
        first: The launch that it was made for.
        is_reusable: Whether it can get other tasks when it has none.
        reply: The open request to it; None if a new request must be sent.
        watched_at: Time of its last check; after its death, the time when that was found.
        died_because: Why it died; empty while it lives.
    """

    first: Launch
    launches: dict[str, Launch]
    actor: Any
    group: PlacementGroup
    is_reusable: bool
    idle_since: float = 0.0
    reply: Any = None
    num_heard: int = 0
    is_placed: bool = False
    silence_s: float = 0.0
    watched_at: float
    died_because: str = ""


class _Versions:
    """Asks every node for its versions before it is used. Nodes with other versions are reported and not used.

    Args:
        asks_head: Whether tasks pass through a process of the head, which then needs ALTO too.

    Attributes:
        expected: The versions that nodes need, by package.
        refused: Why nodes are not used, by Ray's id.
    """

    def __init__(self, *, asks_head: bool) -> None:
        self._asks_head = asks_head
        self.expected = {package: version_of(package) for package in PACKAGES}
        self._right: set[str] = set()
        self._asked: dict[str, tuple[Any, float]] = {}
        self._ask_again_at: dict[str, float] = {}
        self.refused: dict[str, str] = {}

    @property
    def is_asking(self) -> bool:
        """Whether nodes still have to answer."""
        return bool(self._asked)

    def admitted(self, table: Table) -> Table:
        """Return the nodes that have the right versions; ask new ones and read their answers, without waiting."""
        alive = {row["NodeID"]: row for row in table if row["Alive"]}
        for known in (self._asked, self._ask_again_at, self.refused):
            for ray_id in known.keys() - alive.keys():
                del known[ray_id]
        for ray_id, row in alive.items():
            if has_slots(row) or (self._asks_head and is_head(row)):
                self._check(ray_id, name_of(row))
        return [row for ray_id, row in alive.items() if ray_id in self._right]

    def doubt(self, ray_id: str) -> None:
        """Ask a node for its versions again before it is used further."""
        self._right.discard(ray_id)

    def _check(self, ray_id: str, name: str) -> None:
        if ray_id in self._right or time.monotonic() < self._ask_again_at.get(ray_id, 0.0):
            return
        if ray_id not in self._asked:
            self._asked[ray_id] = _ask_versions(ray_id, PACKAGES), time.monotonic() + VERSIONS_TIMEOUT_S
        answer, until = self._asked[ray_id]
        if ray.wait([answer], timeout=0)[0]:
            try:
                problem = version_problem(name, self.expected, ray.get(answer))
            except (RaySystemError, RpcError):
                raise
            except RayError as error:
                problem = f"node {name}: expected its versions, found an error ({first_line(error)})"
        elif time.monotonic() > until:
            problem = f"node {name}: expected its versions within {VERSIONS_TIMEOUT_S:.0f} s, found no answer"
        else:
            return
        del self._asked[ray_id]
        if not problem:
            self._right.add(ray_id)
            self.refused.pop(ray_id, None)
            return
        if self.refused.get(ray_id) != problem:
            _LOG.warning("ClusterVersionError: %s; until then it is not used", problem)
        self.refused[ray_id] = problem
        self._ask_again_at[ray_id] = time.monotonic() + ASK_AGAIN_S


def _ask_versions(ray_id: str, packages: Sequence[str]) -> Any:
    """Ask a node for the versions of packages, None if one is not installed. Return Ray's reference to the answer."""

    # A function in a function: Ray sends its code, so that it also runs where ALTO is missing.
    def versions(packages: Sequence[str]) -> dict[str, str | None]:
        from importlib import metadata

        found: dict[str, str | None] = {}
        for package in packages:
            try:
                found[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                found[package] = None
        try:
            from alto.version import __version__

            found["alto-lora"] = __version__
        except Exception as error:
            found["alto-lora"] = None if found["alto-lora"] is None else f"that cannot be imported ({error!r:.200})"
        return found

    strategy = NodeAffinitySchedulingStrategy(ray_id, soft=False)
    # One call per process, because an older process may have imported a version that is no longer installed.
    remote = ray.remote(max_calls=1)(versions).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    return remote.remote(packages)


class RayCluster:
    """Runs executors on the nodes of an existing Ray cluster, and leaves the cluster running.

    If no node has a GPU, CPU slots are used instead: a slot is one CPU of Ray. The GPU numbers here only count slots;
    Ray decides which GPUs an executor gets when it sets ``CUDA_VISIBLE_DEVICES``. An executor runs on the first node of
    its launch; GPUs on other nodes are reserved with it, but an executor of several ranks must not have any.
    If nodes with GPUs join while CPU slots are used, `poll` raises `ClusterLostError`; a new one uses the GPUs.
    Every node needs the same version of ALTO and must see the folders of runs at the same path.

    If an actor dies but its node is alive, its executor saves and exits without being asked; until then the lock of the
    run keeps another attempt waiting.

    Args:
        address: ``ray://HOST:PORT``; or ``auto`` for the cluster that this process is connected to, that
            ``RAY_ADDRESS`` names, or that this machine belongs to.
        total_gpus: Maximum number of GPUs to use; None for all. There may be fewer, now or later.
        heartbeat_timeout_s, start_timeout_s, drain_timeout_s: See `LocalCluster`; an actor that is silent for
            ``heartbeat_timeout_s`` also counts as hung.
        placement_timeout_s: Longest time for Ray to give a launch its GPUs (others may hold them) and an actor.

    Raises:
        SpecError: There is no Ray cluster at that address, or it has no slots.
        ClusterVersionError: Its nodes have other versions of ALTO or torch. If only some of them have, these are
            reported as warnings and not used, until they have the right versions.
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
        self._actors: list[_Actor] = []
        self._is_ours = _connect(address)
        self._is_lost = False
        try:
            with self._connected():
                self._head = _head()
                self._head_seen_at = time.monotonic()
                self._versions = _Versions(asks_head=self._head is None)
                table = self._first_nodes()
        except BaseException:
            self.close()
            raise
        self._resource = slot_resource(table)
        self._nodes = RayNodes(self._resource, total_gpus)
        self._nodes.update(table)
        self._counted_at = time.monotonic()

    def _first_nodes(self) -> Table:
        """Return the nodes that can be used; wait until all have reported their versions."""
        while True:
            table = ray.nodes()
            admitted = self._versions.admitted(table)
            if not self._versions.is_asking:
                break
            time.sleep(0.1)
        refused = self._versions.refused
        heads = [row["NodeID"] for row in table if self._head is None and is_head(row)]
        if not any(map(has_slots, admitted)) or not refused.keys().isdisjoint(heads):
            if refused:
                raise ClusterVersionError("; ".join(refused.values()))
            raise SpecError(
                f"cluster: expected a Ray cluster with a GPU or a CPU, found none on its {len(table)} nodes; add nodes "
                "with: ray start --address=..."
            )
        return admitted

    @property
    def nodes(self) -> Sequence[Node]:
        """The nodes with slots, as :meth:`poll` last found them."""
        return self._nodes.nodes

    @property
    def has_gpus(self) -> bool:
        """Whether slots are GPUs; false if CPU slots are used instead."""
        return self._resource == "GPU"

    def start(self, launch: Launch) -> None:
        """Start an executor, as `Cluster.start` does; return before Ray has placed it.

        Raises:
            ValueError: The task already runs, or a GPU is taken or is not in this cluster.
            ClusterLostError: The connection to Ray is lost.
        """
        check_launch(launch, self.nodes, [found for actor in self._actors for found in actor.launches.values()])
        with self._connected():
            while not self._is_head_there():
                time.sleep(TICK_S)
            found = self._of_executor(launch) or self._idle(launch)
            for other in [other for other in self._actors if other is not found and not other.launches]:
                if not set(other.first.gpus).isdisjoint(launch.gpus):
                    self._release(other)
            actor = found or self._new_actor(launch)
            actor.launches[launch.task] = launch
            actor.actor.start.remote(launch)  # its errors are events, see Starter.start
            if actor.reply is None:
                actor.watched_at = time.monotonic()

    def _of_executor(self, launch: Launch) -> _Actor | None:
        """Return the actor that works on other tasks of the same executor."""
        for actor in self._actors if launch.executor else ():
            if any(other.executor == launch.executor for other in actor.launches.values()):
                return actor
        return None

    def _idle(self, launch: Launch) -> _Actor | None:
        """Return an actor without a task on the same GPUs whose process holds the base model of ``launch``."""
        for actor in self._actors if launch.num_ranks == 1 and not launch.trust_remote_code else ():
            is_ready = actor.is_reusable and not actor.launches and not actor.died_because
            if is_ready and actor.first.gpus == launch.gpus and actor.first.base == launch.base:
                return actor
        return None

    def _new_actor(self, launch: Launch) -> _Actor:
        shares = Counter(gpu.node for gpu in launch.gpus)
        ids = [self._nodes.id_of(node) for node in shares]
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
                has_gpus=self.has_gpus,
                core_fraction=num_gpus / self._nodes.num_slots(launch.gpus[0].node),
                timeouts=self._timeouts,
                versions=self._versions.expected,
            )
        )
        found = _Actor(
            first=launch,
            launches={},
            actor=actor,
            group=group,
            is_reusable=launch.num_ranks == 1 and not launch.trust_remote_code,
            watched_at=time.monotonic(),
        )
        self._actors.append(found)
        return found

    def stop(self, task: str) -> None:
        """Ask an executor to save and stop; raise `ClusterLostError` if the connection to Ray is lost."""
        for actor in self._actors:
            if task in actor.launches:
                with self._connected():
                    actor.actor.stop.remote(task)

    def poll(self, timeout_s: float) -> list[ClusterEvent]:
        """Return events, as `Cluster.poll` does; raise `ClusterLostError` if the connection to Ray is lost."""
        gives_up_at = time.monotonic() + timeout_s
        while True:
            with self._connected():
                handled = [event for actor in list(self._actors) for event in self._handle(actor)]
                events = [*self._count_nodes(), *handled, *self._end_stranded(), *self._end_dead()]
                self._end_idle()
                left_s = gives_up_at - time.monotonic()
                if events or left_s <= 0:
                    return events
                self._wait(min(left_s, TICK_S))

    def close(self) -> None:
        """Kill running executors and close this process's connection to Ray; the Ray cluster itself keeps running.

        If the connection was already lost, Ray stops the actors, and their executors save and exit without being asked.
        """
        if self._is_lost or not _is_initialized():
            if self._is_ours:
                # Otherwise Ray Client counts this process as connected, and no later connection succeeds.
                with contextlib.suppress(Exception):
                    ray.shutdown()
            return
        closed = [actor.actor.close.remote() for actor in self._actors]
        if closed:
            ray.wait(closed, num_returns=len(closed), timeout=CLOSE_TIMEOUT_S)
        for actor in list(self._actors):
            self._release(actor)
        if self._is_ours:
            ray.shutdown()

    def _wait(self, timeout_s: float) -> None:
        """Wait until an actor has answered, at most ``timeout_s``."""
        replies = [actor.reply for actor in self._actors if actor.reply is not None]
        if replies:
            ray.wait(replies, timeout=timeout_s)
        else:
            time.sleep(timeout_s)

    # -- the connection --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        """Raise ClusterLostError if the connection to Ray is lost inside the block."""
        try:
            if not _is_initialized():  # otherwise Ray would start its own cluster here
                raise ConnectionError("this process was disconnected")
            yield
        except ClusterLostError:
            raise
        except (ConnectionError, RaySystemError, RpcError) as error:
            self._is_lost = True
            raise ClusterLostError(
                f"expected the Ray cluster to answer, found the connection lost ({first_line(error)}); executors "
                "that still run save their work and end. Check that the cluster is up (ray status), then continue "
                "with: alto resume runs/queue-<id>"
            ) from error

    def _is_head_there(self) -> bool:
        """Return whether the head is reachable; while it is not, calls of Ray do not return."""
        if self._head is None:
            return True
        try:
            socket.create_connection(self._head, timeout=TICK_S).close()
        except OSError as error:
            if time.monotonic() > self._head_seen_at + HEAD_TIMEOUT_S:
                raise ConnectionError(
                    f"the head at {self._head[0]}:{self._head[1]} did not answer for {HEAD_TIMEOUT_S:.0f} s"
                ) from error
            return False
        self._head_seen_at = time.monotonic()
        return True

    # -- executors -------------------------------------------------------------------------------------------------

    def _handle(self, actor: _Actor) -> Iterator[ClusterEvent]:
        """Handle an actor's answer and send the next request."""
        if actor.died_because:
            return
        if actor.reply is not None:
            if not ray.wait([actor.reply], timeout=0)[0]:
                yield from self._check_silence(actor)
                return
            try:
                events = ray.get(actor.reply)
            except ActorUnavailableError:
                # The connection broke. Either it recovers, or Ray finds out that the actor or its node is dead.
                actor.reply = None
                yield from self._check_silence(actor)
                return
            except RayError as error:
                if isinstance(error, ActorDiedError) and error.actor_init_failed:
                    yield from self._end(actor, _start_failure(actor.first, error), Outcome.FAILED)
                    return
                actor.reply = None
                actor.died_because, actor.watched_at = f"its actor ended: {first_line(error)}", time.monotonic()
                return
            actor.num_heard += len(events)
            actor.is_placed = True
            actor.silence_s, actor.watched_at = 0.0, time.monotonic()
            for event in events:
                yield event
                if isinstance(event, AttemptEnded):
                    launch = actor.launches.pop(event.task, None)
                    actor.idle_since = time.monotonic()
                    if launch is not None and event.error == ClusterVersionError.__name__:
                        self._versions.doubt(self._nodes.id_of(launch.gpus[0].node) or "")
        if actor.launches:
            actor.reply = actor.actor.poll.remote(actor.num_heard, TICK_S)
        else:
            actor.reply = None

    def _check_silence(self, actor: _Actor) -> Iterator[AttemptEnded]:
        now = time.monotonic()
        # Time in which this process itself was stopped or busy counts little: it could not see any heartbeat.
        actor.silence_s += min(now - actor.watched_at, 2 * TICK_S)
        actor.watched_at = now
        if actor.is_placed and actor.silence_s > self._timeouts.heartbeat_s:
            reason = f"hung: no heartbeat from its actor for {actor.silence_s:.0f} s"
            yield from self._end(actor, reason)
        elif not actor.is_placed and actor.silence_s > self._placement_timeout_s:
            reason = (
                f"Ray did not start it within {self._placement_timeout_s:.0f} s; other programs may hold its "
                f"{self._resource}s, see: ray status"
            )
            yield from self._end(actor, reason)

    def _end(self, actor: _Actor, reason: str, outcome: Outcome = Outcome.LOST) -> Iterator[AttemptEnded]:
        """Release an actor, and report the end of everything that it works on."""
        self._release(actor)
        for launch in actor.launches.values():
            yield AttemptEnded.of(launch, Ending(outcome=outcome, reason=reason))

    def _end_idle(self) -> None:
        """Release actors without a task that cannot get others, or have waited too long for one."""
        for actor in [actor for actor in self._actors if not actor.launches]:
            is_of_use = actor.is_reusable and bool(actor.first.base) and not actor.died_because
            if not is_of_use or time.monotonic() > actor.idle_since + IDLE_TIMEOUT_S:
                self._release(actor)

    def _release(self, actor: _Actor) -> None:
        """Kill an actor and return its GPUs to Ray."""
        self._actors.remove(actor)
        ray.kill(actor.actor)
        remove_placement_group(actor.group)

    # -- nodes -----------------------------------------------------------------------------------------------------

    def _count_nodes(self) -> list[GpuLost | GpuAdded]:
        if time.monotonic() < self._counted_at + TICK_S or not self._is_head_there():
            return []
        table = self._versions.admitted(ray.nodes())
        self._check_resource(table)
        changes = self._nodes.update(table)
        self._counted_at = time.monotonic()
        return changes

    def _check_resource(self, table: Table) -> None:
        """Stop all executors if GPUs have joined a cluster with CPU slots, so that a restart uses the GPUs."""
        if self.has_gpus or slot_resource(table) != "GPU":
            return
        for actor in list(self._actors):
            self._release(actor)  # executors that lose their actor save and end
        raise ClusterLostError(
            "expected a Ray cluster without GPUs, as when ALTO connected, found that nodes with GPUs have joined; "
            "executors on CPU slots save their work and end. Continue on the GPUs with: alto resume runs/queue-<id>"
        )

    def _end_stranded(self) -> Iterator[AttemptEnded]:
        """Report the end of executors that had a GPU on a node that is gone."""
        for actor in list(self._actors):
            gone = sorted({gpu.node for gpu in actor.first.gpus if self._nodes.id_of(gpu.node) is None})
            if gone:
                yield from self._end(actor, f"{', '.join(gone)} left the cluster")

    def _end_dead(self) -> Iterator[AttemptEnded]:
        """Report the end of executors whose actor died a while ago on a node that lives."""
        for actor in list(self._actors):
            if actor.died_because and time.monotonic() > actor.watched_at + NODE_VERDICT_S:
                yield from self._end(actor, actor.died_because)


def _check_version(version: str) -> None:
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise UnsupportedError(
            f"expected Ray {OLDEST[0]}.{OLDEST[1]} or newer, found {version}; "
            'pip install --upgrade "alto-lora[ray]", on every node'
        )


def _connect(address: str) -> bool:
    """Connect to a cluster; return whether this call made the connection."""
    if address == "auto" and ray.is_initialized():
        return False
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        with contextlib.suppress(Exception):
            ray.shutdown()  # what is left of a client that could not connect
        raise SpecError(
            f"cluster: expected a Ray cluster at {address!r}, found none ({first_line(error)}); "
            "start one with: ray start --head, or give its address as ray://HOST:10001; if it needs a token, set "
            "RAY_AUTH_MODE=token"
        ) from error
    finally:
        # Ray's handler would end this process at once, but running executors must be drained. Ray sets it only in the
        # main thread; in another one, a change is not Ray's.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is not before:
            signal.signal(signal.SIGTERM, before)
    return True


def _is_initialized() -> bool:
    """Return whether this process is connected to Ray; false if the channel of Ray Client is closed."""
    try:
        return bool(ray.is_initialized())
    except ValueError:  # grpc: "Cannot invoke RPC on closed channel!"
        return False


def _head() -> tuple[str, int] | None:
    """Return the address (host, port) of the Ray head node. None if this process is connected through Ray Client: the
    Ray Client server then reports that the head is gone."""
    if ray.util.client.ray.is_connected():
        return None
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    return host.strip("[]"), int(port)


def _start_failure(launch: Launch, error: ActorDiedError) -> str:
    cause = str(error).strip().splitlines()[-1].strip()
    return (
        f"expected the same version of ALTO on every node, found that {launch.gpus[0].node} cannot start it ({cause}); "
        'pip install "alto-lora[ray]" there, into the Python environment of Ray'
    )
