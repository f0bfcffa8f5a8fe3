"""One executor on this machine: what it writes into its journal, whether it still works, and how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from alto.cluster.attempt import AttemptDir, unwritten_ending
from alto.cluster.base import ClusterEvent, EntryWritten, ExecutorEnded, Launch, Outcome
from alto.cluster.process_group import ProcessGroup
from alto.cluster.rendezvous import FOLDER, Rendezvous
from alto.cluster.zygote import Zygote
from alto.errors import RunError
from alto.runs import JournalEntry, JournalTail, RunDir

__all__ = ["LocalExecutor", "Timeouts"]

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Where PyTorch looks for them; the first is its name for all devices, the others are older."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Timeouts of an executor, in seconds.

    Attributes:
        heartbeat_s: Without a sign of life, once it has written into its journal.
        start_s: Without a sign of life, before: models are loaded and data read in that time.
        drain_s: From being asked to stop until it has saved and ended.
    """

    heartbeat_s: float
    start_s: float
    drain_s: float


class LocalExecutor:
    """A process group that works on the run of ``launch``.

    Args:
        zygote: Forks its first process.
        devices: Its own, as CUDA names them; none where slots of the CPU stand for GPUs.
        num_threads: Of the CPU.
        timeouts: Timeouts, in seconds.

    Raises:
        OSError: It cannot be started. (`RunWriteError` is one.)
    """

    def __init__(
        self, launch: Launch, zygote: Zygote, *, devices: tuple[str, ...], num_threads: int, timeouts: Timeouts
    ) -> None:
        self.launch = launch
        self._timeouts = timeouts
        self._attempt = AttemptDir.create(Path(launch.run_dir), launch.attempt)
        self._tail = JournalTail(RunDir(Path(launch.run_dir)).journal_file)
        self._skip_past()
        self._rendezvous = Rendezvous() if launch.num_ranks > 1 else None
        self._group = ProcessGroup(
            zygote,
            "alto.cluster.worker",
            (
                str(self._attempt.root),
                *("--entry", launch.entry),
                *("--grace-s", str(timeouts.drain_s)),
            ),
            env={
                **_environment(devices, num_threads, launch),
                **(self._rendezvous.variables if self._rendezvous is not None else {FOLDER: ""}),
            },
        )
        self._has_begun = False
        self._killed_because = ""
        self._heartbeat: int | None = None
        self._silence_s = 0.0
        self._watched_at = time.monotonic()
        self._drains_until = float("inf")

    def watch(self) -> list[ClusterEvent]:
        """The new events; the last event of an executor is :class:`ExecutorEnded`."""
        has_ended = self._has_ended()  # checked first: everything that it wrote before is read below
        entries = self._read_journal()
        heartbeat = self._read_heartbeat()
        if heartbeat is None:
            entries = []  # by the previous holder of the lock
        self._has_begun = self._has_begun or bool(entries)
        if not has_ended:
            self._kill_if_overdue(is_silent=heartbeat == self._heartbeat and not entries)
        self._heartbeat = heartbeat
        events: list[ClusterEvent] = [
            EntryWritten(task=self.launch.task, attempt=self.launch.attempt, entry=entry) for entry in entries
        ]
        return [*events, self._ending()] if has_ended else events

    def ask_to_stop(self) -> None:
        """Let it save and end; it is killed if it does not."""
        self._drains_until = min(self._drains_until, time.monotonic() + self._timeouts.drain_s)
        self._group.ask_to_stop()

    def kill(self) -> bool:
        """Kill it; returns whether it is gone."""
        self._group.kill()
        return self._has_ended()

    def _has_ended(self) -> bool:
        has_ended = self._group.has_ended()
        if has_ended and self._rendezvous is not None:
            self._rendezvous.close()
        return has_ended

    def _skip_past(self) -> None:
        """Skip what earlier attempts have written; the executor itself checks whether that is damaged."""
        with contextlib.suppress(RunError, OSError):
            self._tail.read()

    def _read_journal(self) -> list[JournalEntry]:
        """The new journal entries; an executor whose journal cannot be read is killed, and started again."""
        try:
            return self._tail.read()
        except RunError as error:
            self._kill_because(str(error))
        except OSError as error:
            self._kill_because(f"the journal of its run cannot be read ({error})")
        return []

    def _read_heartbeat(self) -> int | None:
        try:
            return self._attempt.heartbeat.stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def _kill_if_overdue(self, *, is_silent: bool) -> None:
        limit_s = self._timeouts.heartbeat_s if self._has_begun else self._timeouts.start_s
        now = time.monotonic()
        # While this process was itself stopped, it could not see any sign of life.
        elapsed_s = min(now - self._watched_at, limit_s / 2)
        self._watched_at = now
        self._silence_s = self._silence_s + elapsed_s if is_silent else 0.0
        if self._killed_because:
            self._group.kill()
        elif self._silence_s > limit_s:
            self._kill_because(f"hung: no sign of life for {self._silence_s:.0f} s")
        elif now > self._drains_until:
            self._kill_because(f"was asked to stop and had not ended after {self._timeouts.drain_s:.0f} s")

    def _kill_because(self, reason: str) -> None:
        self._killed_because = reason
        self._group.kill()

    def _ending(self) -> ExecutorEnded:
        code = self._group.exit_code
        said = self._attempt.ending() or (unwritten_ending(code, self._attempt) if code is not None else None)
        return ExecutorEnded(
            task=self.launch.task,
            attempt=self.launch.attempt,
            outcome=said.outcome if said is not None else Outcome.LOST,
            reason=said.reason if said is not None else self._killed_because or self._why_it_is_gone(),
            error=said.error if said is not None else "",
        )

    def _why_it_is_gone(self) -> str:
        code = self._group.exit_code
        if code is None:
            return self._group.why_not_started or "its process is gone, with the one that had started it"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"its process {how} and reported no reason; see {self._attempt.stderr}"


def _environment(devices: tuple[str, ...], num_threads: int, launch: Launch) -> dict[str, str]:
    """Of the first process of an executor, which shares the cores with its other ranks."""
    num_threads = max(1, num_threads // launch.num_ranks)
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(launch.num_ranks),
        "LOCAL_WORLD_SIZE": str(launch.num_ranks),
        "ALTO_TRUST_REMOTE_CODE": str(int(launch.trust_remote_code)),
        "CUDA_VISIBLE_DEVICES": ",".join(devices),
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        **(_allocator() if devices else {}),
    }


def _allocator() -> dict[str, str]:
    """Settings of PyTorch's CUDA allocator, read at its first use; the user's own settings are kept.

    Micro-batches differ in length; only with expandable segments can fragmented free memory serve a longer one.
    """
    if any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        return {}
    return {_ALLOCATOR_VARIABLES[0]: "expandable_segments:True"}
