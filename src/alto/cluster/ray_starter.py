"""The actor that starts and watches executors on a node of a Ray cluster, as on a single machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from alto.base import first_line
from alto.cluster.base import AttemptEnded, ClusterEvent, Ending, Launch, Outcome
from alto.cluster.executor_process import ProcessShape, Timeouts
from alto.cluster.machine import Machine
from alto.cluster.ray_nodes import version_problem
from alto.errors import ClusterVersionError
from alto.version import version_of


class Starter:
    """Starts executors on the GPUs that Ray gave to this actor. If this process dies, they live on only to save.

    Args:
        has_gpus: Whether ``CUDA_VISIBLE_DEVICES`` names the actor's GPUs; otherwise CPU slots are used instead.
        core_fraction: Fraction of this machine's cores that the executors' threads may use, in (0, 1].
        versions: Versions that packages must have here, by name.
    """

    def __init__(
        self, *, has_gpus: bool, core_fraction: float, timeouts: Timeouts, versions: Mapping[str, str | None]
    ) -> None:
        self._has_gpus = has_gpus
        self._core_fraction = core_fraction
        self._versions = versions
        self._machine = Machine(timeouts, idle_timeout_s=float("inf"))  # this actor is ended when it is idle
        self._events: list[ClusterEvent] = []
        self._num_forgotten = 0

    def start(self, launch: Launch) -> None:
        """Start an executor, or give a running executor another run. The GPUs named in the launch are ignored, because
        Ray has chosen them. An error ends the attempt: nobody waits for the result of this call."""
        try:
            self._start(launch)
        except Exception as error:
            reason = f"it cannot be started on {launch.gpus[0].node} ({type(error).__name__}: {first_line(error)})"
            self._events.append(AttemptEnded.of(launch, Ending(outcome=Outcome.FAILED, reason=reason)))

    def _start(self, launch: Launch) -> None:
        if launch.num_ranks > 1 and len({gpu.node for gpu in launch.gpus}) > 1:
            reason = (
                f"expected {len(launch.gpus)} GPUs on one machine for the ranks of the task, found no such machine "
                "any more; add a node, or lower num_gpus"
            )
            self._events.append(AttemptEnded.of(launch, Ending(outcome=Outcome.LOST, reason=reason)))
            return
        # Packages may have been upgraded here since the node joined.
        found = {package: version_of(package) for package in self._versions}
        if problem := version_problem(launch.gpus[0].node, self._versions, found):
            ending = Ending(outcome=Outcome.LOST, reason=problem, error=ClusterVersionError.__name__)
            self._events.append(AttemptEnded.of(launch, ending))
            return
        if not Path(launch.run_dir).is_dir():
            reason = (
                f"expected the folder of the run on every node, found no {launch.run_dir} on "
                f"{launch.gpus[0].node}; give an --output-dir on storage that all nodes share, at the same path"
            )
            self._events.append(AttemptEnded.of(launch, Ending(outcome=Outcome.FAILED, reason=reason)))
            return
        shape = ProcessShape(
            devices=tuple(os.environ["CUDA_VISIBLE_DEVICES"].split(",")) if self._has_gpus else (),
            num_threads=max(1, round(len(os.sched_getaffinity(0)) * self._core_fraction)),
            num_ranks=launch.num_ranks,
            memory_share=1.0 if self._has_gpus else self._core_fraction,
        )
        self._machine.start(launch, shape)

    def poll(self, num_heard: int, timeout_s: float) -> list[ClusterEvent]:
        """Return all events after the first ``num_heard``; wait up to ``timeout_s`` if there are none.

        Events are removed only when the next request counts them as received, so a lost answer is repeated.
        """
        del self._events[: num_heard - self._num_forgotten]
        self._num_forgotten = num_heard
        self._events += self._machine.poll(0.0 if self._events else timeout_s)
        return list(self._events)

    def stop(self, task: str) -> None:
        """Let a run save and end; kill its executor if it does not end in time."""
        self._machine.stop(task)

    def close(self) -> None:
        """Kill the executors; none of their processes is left when this returns."""
        self._machine.close()
