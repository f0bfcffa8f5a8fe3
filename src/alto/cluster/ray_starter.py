"""What runs on a node of a Ray cluster: one executor, started and watched as on a machine of its own."""

from __future__ import annotations

import os
import time
from pathlib import Path

from alto.cluster.base import ClusterEvent, ExecutorEnded, Launch, Outcome
from alto.cluster.entry import ending_by
from alto.cluster.local_executor import LocalExecutor, Timeouts
from alto.cluster.zygote import Zygote

__all__ = ["Starter"]

WATCH_INTERVAL_S = 0.05


class Starter:
    """Starts one executor at once, in a session of its own; it outlives this process only to save.

    Args:
        launch: Which GPUs it names does not matter: Ray has chosen.
        has_gpus: Whether ``CUDA_VISIBLE_DEVICES`` names those; otherwise slots of the CPU stand for GPUs.
        core_share: How much of this machine's cores its threads may take, in (0, 1].
        timeouts: Timeouts of the executor, in seconds.
    """

    def __init__(self, launch: Launch, *, has_gpus: bool, core_share: float, timeouts: Timeouts) -> None:
        self._events: list[ClusterEvent] = []
        self._num_forgotten = 0
        self._executor: LocalExecutor | None = None
        if launch.num_ranks > 1 and len({gpu.node for gpu in launch.gpus}) > 1:
            self._events.append(
                _ended(
                    launch,
                    Outcome.LOST,
                    f"expected {len(launch.gpus)} GPUs on one machine for the ranks of the task, found none that large "
                    "any more; add a node, or lower num_gpus",
                )
            )
            return
        if not Path(launch.run_dir).is_dir():
            self._events.append(
                _ended(
                    launch,
                    Outcome.FAILED,
                    f"expected the folder of the run on every node, found no {launch.run_dir} on "
                    f"{launch.gpus[0].node}; give an --output-dir on storage that all nodes share, at the same path",
                )
            )
            return
        try:
            self._executor = LocalExecutor(
                launch,
                Zygote.shared(),
                devices=tuple(os.environ["CUDA_VISIBLE_DEVICES"].split(",")) if has_gpus else (),
                num_threads=max(1, round(len(os.sched_getaffinity(0)) * core_share)),
                timeouts=timeouts,
            )
        except OSError as error:
            ending = ending_by(error)
            self._events.append(_ended(launch, ending.outcome, str(error), ending.error))

    def poll(self, num_heard: int, timeout_s: float) -> list[ClusterEvent]:
        """All events after the first ``num_heard``; waits up to ``timeout_s`` where there are none.

        A lost answer is repeated: only events that the next request counts as received are removed.
        """
        gives_up_at = time.monotonic() + timeout_s
        del self._events[: num_heard - self._num_forgotten]
        self._num_forgotten = num_heard
        while True:
            if self._executor is not None:
                self._events += self._executor.watch()
                if self._events and isinstance(self._events[-1], ExecutorEnded):
                    self._executor = None
            if self._events or time.monotonic() >= gives_up_at:
                return list(self._events)
            time.sleep(WATCH_INTERVAL_S)

    def stop(self) -> None:
        """Let the executor save and end; it is killed if it does not."""
        if self._executor is not None:
            self._executor.ask_to_stop()

    def close(self) -> None:
        """Kill the executor; no process of it is left when this returns."""
        while self._executor is not None and not self._executor.kill():
            time.sleep(WATCH_INTERVAL_S)


def _ended(launch: Launch, outcome: Outcome, reason: str, error: str = "") -> ExecutorEnded:
    return ExecutorEnded(task=launch.task, attempt=launch.attempt, outcome=outcome, reason=reason, error=error)
