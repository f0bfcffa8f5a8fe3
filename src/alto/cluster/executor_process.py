"""A process on this machine that works on runs, one after the other or several at the same time; and its runs, as seen
by its cluster.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from alto.cluster.attempt import AttemptDir, ending_of_exit
from alto.cluster.base import AttemptEnded, ClusterEvent, Ending, EntryWritten, Launch, Outcome
from alto.cluster.orders import Orders
from alto.cluster.processes import kill_session
from alto.cluster.rendezvous import FOLDER, Rendezvous
from alto.cluster.zygote import Zygote
from alto.errors import RunError
from alto.runs import JournalEntry, JournalTail, RunDir
from alto.runs.events import MeasuringBegun


class ProcessGroup:
    """A separate session for a Python module; all processes started in it belong to it too.

    Args:
        module: Module whose ``main()`` is run. `HELD_SIGNALS` are blocked until it unblocks them.
        uses: See :meth:`Zygote.fork`.

    Raises:
        OSError: The zygote cannot be started.
    """

    def __init__(
        self, zygote: Zygote, module: str, args: Sequence[str], *, env: Mapping[str, str], uses: Sequence[str]
    ) -> None:
        self._zygote = zygote
        self._first = zygote.fork(module, args, {**os.environ, **env}, uses=uses)
        self._is_to_stop = False
        self._is_to_die = False
        self._is_reaping = False
        self._has_ended = False

    def has_ended(self) -> bool:
        """Return whether all processes of the session have exited; if the first one has exited, kill the others."""
        if self._has_ended:
            return True
        self._zygote.poll()
        if not self._first.has_exited:
            self._signal()
            return False
        # Reap the first process last: until then, the OS cannot reuse its PID as the id of another session.
        if self._first.pid is not None and not kill_session(self._first.pid):
            return False
        if not self._is_reaping:
            self._is_reaping = True
            self._zygote.reap(self._first)
        self._has_ended = self._first.is_reaped
        return self._has_ended

    @property
    def exit_code(self) -> int | None:
        """Exit code of the first process, negative for a signal; None if unknown."""
        assert self._has_ended, "it runs"
        return self._first.exit_code

    @property
    def why_not_started(self) -> str:
        """Why it could not be started; empty if it was."""
        return self._first.reason

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the first process only, once it is forked; it needs the others until it has saved."""
        self._is_to_stop = True
        self._signal()

    def kill(self) -> None:
        """Send SIGKILL to all processes, once they are forked; :meth:`has_ended` returns whether they are gone."""
        self._is_to_die = True
        self._signal()

    def _signal(self) -> None:
        if self._first.pid is None or self._has_ended:
            return
        if self._is_to_die:
            kill_session(self._first.pid)
        elif self._is_to_stop:
            self._is_to_stop = False
            with contextlib.suppress(ProcessLookupError):  # its zygote has died and no longer reserves its process id
                os.kill(self._first.pid, signal.SIGTERM)


_WORKER = "alto.cluster.worker"

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables that PyTorch reads; the first covers all devices, the others are older names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessShape:
    """The resources of a process, fixed for its lifetime. A process can be reused for runs that need the same shape.

    Attributes:
        devices: Its GPUs, under their names in CUDA; empty if CPU slots are used instead of GPUs.
        num_threads: Total number of CPU threads over all of its ranks.
        memory_share: Fraction of the machine's memory that its ranks may plan with, if CPU slots are used instead of
            GPUs.
        variables: Environment of the process that starts it.
    """

    devices: tuple[str, ...]
    num_threads: int
    num_ranks: int = 1
    memory_share: float = 1.0
    folder: str = field(default_factory=os.getcwd)
    variables: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def environment(self) -> dict[str, str]:
        """Return environment variables of its first process, which shares the cores with the other ranks."""
        num_threads = max(1, self.num_threads // self.num_ranks)
        return {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_WORLD_SIZE": str(self.num_ranks),
            "CUDA_VISIBLE_DEVICES": ",".join(self.devices),
            "OMP_NUM_THREADS": str(num_threads),
            "MKL_NUM_THREADS": str(num_threads),
            "ALTO_MEMORY_SHARE": str(self.memory_share),
            **(_allocator() if self.devices else {}),
        }


class ExecutorProcess:
    """A process of a given shape, with all processes that it starts.

    Args:
        host: Host of the first launch; the zygote imports its module, also for later processes.
        grace_s: Seconds that it has to save after this process has died.

    Attributes:
        base: Base model of the latest launch that named one; the process may still hold it.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(self, zygote: Zygote, shape: ProcessShape, host: str, *, grace_s: float) -> None:
        self.shape = shape
        self.runs: list[WatchedRun] = []
        self.base = ""
        self.is_reusable = True
        self._killed_because = ""
        self._has_ended = False
        self._was_shared = False
        self._orders = Orders.create()
        self._rendezvous = Rendezvous() if shape.num_ranks > 1 else None
        self._group = ProcessGroup(
            zygote,
            _WORKER,
            (str(self._orders.root), "--grace-s", str(grace_s)),
            env={
                **shape.environment(),
                **(self._rendezvous.variables if self._rendezvous is not None else {FOLDER: ""}),
            },
            uses=(_WORKER, host.partition(":")[0]),
        )

    def work(self, launch: Launch, attempt: AttemptDir) -> int:
        """Order it to work on the run of ``launch``; return the number of the order.

        Raises:
            OSError: The order cannot be written.
        """
        self.base = launch.base or self.base
        return self._orders.work(launch.ticket, attempt)

    def ending(self, number: int, attempt: AttemptDir) -> Ending | None:
        """Return how the attempt of an order ended; None while it works.

        The process's own report has priority, then the reason why it was killed, then its exit code. If the process
        takes no more orders, its last attempt has ended only once none of its processes is left.
        """
        reported = self.reported(number)
        if reported is not None and (self._orders.takes_more or len(self.runs) > 1):
            return reported
        if not self.has_ended():
            return None
        return reported or self.reported(number) or self._unreported(attempt)

    def reported(self, number: int) -> Ending | None:
        """Return its report on the end of an order's attempt; None if there is none yet."""
        reported = self._orders.ended(number)
        self.is_reusable = self.is_reusable and self._orders.takes_more
        return reported

    def ask_to_stop(self, number: int) -> None:
        """Ask the attempt of an order to save and stop; stop the process itself if it works on nothing else."""
        if len(self.runs) > 1:
            self._orders.stop(number)
        else:
            self.is_reusable = False
            self._group.ask_to_stop()

    def kill(self, reason: str = "") -> bool:
        """Kill it; return whether it is gone."""
        self.is_reusable = False
        self._killed_because = self._killed_because or reason
        self._group.kill()
        return self.has_ended()

    def has_ended(self) -> bool:
        """Return whether none of its processes is left."""
        if not self._has_ended and self._group.has_ended():
            self._has_ended, self._was_shared, self.is_reusable = True, len(self.runs) > 1, False
            if self._rendezvous is not None:
                self._rendezvous.close()
        return self._has_ended

    @property
    def is_being_killed(self) -> bool:
        """Whether it was killed for a reason."""
        return bool(self._killed_because)

    @property
    def has_begun(self) -> bool:
        """Whether all its runs have written into their journals, so that no model or data is being loaded."""
        return all(run.has_begun for run in self.runs)

    def _unreported(self, attempt: AttemptDir) -> Ending:
        code = self._group.exit_code
        if code is None:
            why = self._group.why_not_started or "its process ended, together with the process that had started it"
            return Ending(outcome=Outcome.LOST, reason=self._killed_because or why)
        return ending_of_exit(code, None if self._was_shared else attempt, killed_because=self._killed_because)

    def close(self) -> None:
        """Remove its folder of orders after it has ended."""
        self._orders.remove()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Timeouts of an executor, in seconds.

    Attributes:
        heartbeat_s: Longest time without a heartbeat once the executor has written into its journal.
        start_s: Longest time without a heartbeat before that, while the executor loads models and reads data.
        drain_s: Longest time for saving and stopping after the executor was asked to stop.
    """

    heartbeat_s: float
    start_s: float
    drain_s: float


class WatchedRun:
    """Watches a process that works on the run of ``launch``, and maybe on others.

    Attributes:
        has_begun: Whether its journal has an event other than measurement progress.

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
        with contextlib.suppress(RunError, OSError):  # the executor itself checks whether past entries are damaged
            self._tail.read()
        self._heartbeat: int | None = None
        self._silence_s = 0.0
        self._watched_at = time.monotonic()
        self._drains_until = float("inf")
        self._can_move = True
        self._number = process.work(launch, self._attempt)
        process.runs.append(self)

    def move(self, find: Callable[[], ExecutorProcess]) -> None:
        """Move the run to another process if its own :attr:`was_ignored`; possible once.

        Raises:
            OSError: The run cannot be moved; its end is reported then.
        """
        self._can_move = False
        process = find()
        self._number = process.work(self.launch, self._attempt)
        self.process.runs.remove(self)
        self.process = process
        process.runs.append(self)
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
        """Return the new events; the last event of the attempt is :class:`AttemptEnded`."""
        # First: everything written before the end is read below.
        ending = self.process.ending(self._number, self._attempt)
        if self.was_ignored:  # only now, because the process may end at any time
            ending = None
        entries = self._read_journal()
        heartbeat = self._read_heartbeat()
        if heartbeat is None:
            entries = []  # written by the previous holder of the lock
        # While its task is measured, it sends no other heartbeat, just as while a model is loaded.
        self.has_begun = self.has_begun or any(not isinstance(entry.event, MeasuringBegun) for entry in entries)
        if ending is None:
            self._kill_if_overdue(is_silent=heartbeat == self._heartbeat and not entries)
        self._heartbeat = heartbeat
        events: list[ClusterEvent] = [
            EntryWritten(task=self.launch.task, attempt=self.launch.attempt, entry=entry) for entry in entries
        ]
        if ending is None:
            return events
        self.process.runs.remove(self)
        return [*events, AttemptEnded.of(self.launch, ending)]

    def ask_to_stop(self) -> None:
        """Ask the executor to save and stop; kill it if it does not stop in time."""
        self._drains_until = min(self._drains_until, time.monotonic() + self._timeouts.drain_s)
        try:
            self.process.ask_to_stop(self._number)
        except OSError as error:
            self.process.kill(f"could not be asked to stop: {error}")

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
        # Time in which this process itself was stopped counts little: it could not see any heartbeat.
        elapsed_s = min(now - self._watched_at, limit_s / 2)
        self._watched_at = now
        self._silence_s = self._silence_s + elapsed_s if is_silent else 0.0
        if self.process.is_being_killed:
            self.process.kill()
        elif self._silence_s > limit_s:
            self.process.kill(f"hung: no heartbeat for {self._silence_s:.0f} s")
        elif now > self._drains_until:
            self.process.kill(f"was asked to stop and had not ended after {self._timeouts.drain_s:.0f} s")


def _allocator() -> dict[str, str]:
    """Return settings of PyTorch's CUDA allocator, which it reads at its first use; none if the user has set some.

    Micro-batches differ in length; only with expandable segments can fragmented free memory serve a longer one.
    """
    if any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        return {}
    return {_ALLOCATOR_VARIABLES[0]: "expandable_segments:True"}
