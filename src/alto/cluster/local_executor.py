"""One run that an executor on this machine works on: its new journal entries, its signs of life, and its end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from alto.cluster.attempt import AttemptDir
from alto.cluster.base import ClusterEvent, EntryWritten, ExecutorEnded, Launch
from alto.cluster.executor_process import ExecutorProcess
from alto.errors import RunError
from alto.runs import JournalEntry, JournalTail, RunDir
from alto.runs.events import MeasuringBegun


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Timeouts of an executor, in seconds.

    Attributes:
        heartbeat_s: Longest time without a sign of life once it has written into its journal.
        start_s: Longest time without a sign of life before that, while it loads models and reads data.
        drain_s: Longest time for saving and ending after it was asked to stop.
    """

    heartbeat_s: float
    start_s: float
    drain_s: float


class LocalExecutor:
    """Watches a process that works on the run of ``launch``, and maybe on others.

    Args:
        process: Works on the run from now on.

    Attributes:
        launch: The run and its work.
        has_begun: Whether it has written into its journal anything but measurement progress.
        process: Works on the run.

    Raises:
        OSError: The attempt's folder or the order cannot be written (`RunWriteError` is an OSError).
    """

    def __init__(self, launch: Launch, process: ExecutorProcess, timeouts: Timeouts) -> None:
        self.launch = launch
        self.has_begun = False
        self.process = process
        self._timeouts = timeouts
        self._attempt = AttemptDir.create(Path(launch.run_dir), launch.attempt)
        self._tail = JournalTail(RunDir(Path(launch.run_dir)).journal_file)
        self._skip_past()
        self._heartbeat: int | None = None
        self._silence_s = 0.0
        self._watched_at = time.monotonic()
        self._drains_until = float("inf")
        self._can_move = True
        self._number = process.work(launch, self._attempt)
        process.executors.append(self)

    def move(self, find: Callable[[], ExecutorProcess]) -> None:
        """Move the run to another process if its own :attr:`was_ignored`; possible once.

        Args:
            find: Returns the other process.

        Raises:
            OSError: The run cannot be moved; its end is reported then.
        """
        self._can_move = False
        process = find()
        self._number = process.work(self.launch, self._attempt)
        self.process.executors.remove(self)
        self.process = process
        process.executors.append(self)
        self._watched_at, self._silence_s = time.monotonic(), 0.0

    @property
    def was_ignored(self) -> bool:
        """Whether its process, after working on other runs, has ended without starting this one."""
        return (
            self._can_move
            and self._number > 1
            and self.process.has_ended()
            and self.process.reported(self._number) is None
            and self._read_heartbeat() is None
            and not self.process.is_being_killed
            and self._drains_until == float("inf")
        )

    def watch(self) -> list[ClusterEvent]:
        """Return the new events; the last event of an executor is :class:`ExecutorEnded`."""
        # First: everything written before the end is read below.
        ending = None if self.was_ignored else self.process.ending(self._number, self._attempt)
        entries = self._read_journal()
        heartbeat = self._read_heartbeat()
        if heartbeat is None:
            entries = []  # written by the previous holder of the lock
        # While its task is measured, it gives no other sign of life, just as while a model is loaded.
        self.has_begun = self.has_begun or any(not isinstance(entry.event, MeasuringBegun) for entry in entries)
        if ending is None:
            self._kill_if_overdue(is_silent=heartbeat == self._heartbeat and not entries)
        self._heartbeat = heartbeat
        events: list[ClusterEvent] = [
            EntryWritten(task=self.launch.task, attempt=self.launch.attempt, entry=entry) for entry in entries
        ]
        if ending is None:
            return events
        self.process.executors.remove(self)
        return [*events, ExecutorEnded.of(self.launch, ending)]

    def ask_to_stop(self) -> None:
        """Let it save and end; kill it if it does not end in time."""
        self._drains_until = min(self._drains_until, time.monotonic() + self._timeouts.drain_s)
        try:
            self.process.ask_to_stop(self._number)
        except OSError as error:
            self.process.kill(f"could not be asked to stop: {error}")

    def _skip_past(self) -> None:
        """Skip the entries of earlier attempts; the executor itself checks whether they are damaged."""
        with contextlib.suppress(RunError, OSError):
            self._tail.read()

    def _read_journal(self) -> list[JournalEntry]:
        """Return the new journal entries; kill an executor whose journal cannot be read, so that it is restarted."""
        try:
            return self._tail.read()
        except RunError as error:
            self.process.kill(str(error))
        except OSError as error:
            self.process.kill(f"the journal of its run cannot be read ({error})")
        return []

    def _read_heartbeat(self) -> int | None:
        try:
            return self._attempt.heartbeat.stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def _kill_if_overdue(self, *, is_silent: bool) -> None:
        # While the process loads a model for one run, its other runs wait.
        limit_s = self._timeouts.heartbeat_s if self.process.has_begun else self._timeouts.start_s
        now = time.monotonic()
        # Time in which this process itself was stopped counts little: it could not see any sign of life.
        elapsed_s = min(now - self._watched_at, limit_s / 2)
        self._watched_at = now
        self._silence_s = self._silence_s + elapsed_s if is_silent else 0.0
        if self.process.is_being_killed:
            self.process.kill()
        elif self._silence_s > limit_s:
            self.process.kill(f"hung: no sign of life for {self._silence_s:.0f} s")
        elif now > self._drains_until:
            self.process.kill(f"was asked to stop and had not ended after {self._timeouts.drain_s:.0f} s")
