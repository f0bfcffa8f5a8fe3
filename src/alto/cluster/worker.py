"""The first process of an executor on this machine, and its first rank; forked by a zygote.

It waits for the run's lock, does its work, writes how that ended, and leaves no process behind. SIGTERM makes the work
save and end; so does the death of the controller that started it, and then within a grace period.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from alto.cluster.attempt import AttemptDir, Ending, exit_code_of
from alto.cluster.base import Outcome
from alto.cluster.entry import ending_of, load_entry
from alto.cluster.processes import HELD_SIGNALS, kill_session
from alto.cluster.rank_processes import RankProcesses
from alto.cluster.rendezvous import remove_rendezvous
from alto.errors import RunBusyError, RunWriteError
from alto.runs import RunDir, writing

__all__ = ["main"]

LOCK_TIMEOUT_S = 60.0
"""The run may be held for a while by an executor whose controller was killed."""

BEAT_INTERVAL_S = 0.5
WATCH_INTERVAL_S = 0.2


class Heartbeat:
    """Whether the work has to stop. Each check is also its sign of life."""

    def __init__(self, attempt: AttemptDir) -> None:
        self._attempt = attempt
        self._is_stopping = False
        self._has_asked = False
        self._beats_at = 0.0

    def is_interrupted(self) -> bool:
        """Touch the heartbeat, and return whether the work has to stop."""
        self._has_asked = True
        self.beat()
        return self._is_stopping

    def beat(self) -> None:
        """Touch the heartbeat, at most once per interval.

        Raises:
            RunWriteError: The run's disk cannot be written.
        """
        now = time.monotonic()
        if now >= self._beats_at:
            with writing(self._attempt.run_dir, self._attempt.heartbeat):
                self._attempt.heartbeat.touch()
            self._beats_at = now + BEAT_INTERVAL_S

    def on_signal(self, _: int, __: FrameType | None) -> None:
        """Stop the work. Before its first check nothing can be lost, so it ends at once."""
        was_stopping, self._is_stopping = self._is_stopping, True
        if not was_stopping and not self._has_asked:
            raise KeyboardInterrupt


def main() -> None:
    """Work on a run; ends this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("attempt_dir", type=Path)
    parser.add_argument("--entry", required=True, help="module:function")
    parser.add_argument("--grace-s", type=float, required=True, help="for saving, once the controller has died")
    parser.add_argument("--parent", type=int, required=True, help="the zygote's process")
    arguments = parser.parse_args()
    Path("/proc/self/comm").write_text("alto-executor")  # for ps and top
    attempt = AttemptDir(arguments.attempt_dir)
    heartbeat = Heartbeat(attempt)
    has_ended = threading.Lock()

    def end(ending: Ending) -> None:
        """The first of the work's end and a rank's death sets how it ended."""
        has_ended.acquire()
        is_written = False
        try:
            with contextlib.suppress(RunWriteError):  # then the exit code encodes it
                attempt.write_ending(ending)
                is_written = True
        finally:
            _kill_rest_of_session()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        # Everything is reported and saved: no library's thread or exit handler may keep the devices.
        os._exit(exit_code_of(ending, is_written=is_written))

    redirected = ending_of(lambda: _redirect_output(attempt))
    if redirected.outcome is not Outcome.FINISHED:
        end(redirected)
    rank_processes = RankProcesses(attempt, arguments.entry, int(os.environ["WORLD_SIZE"]), on_death=end)
    started = ending_of(rank_processes.start)
    threading.Thread(target=_outlive, args=(arguments.parent, arguments.grace_s), daemon=True).start()
    if started.outcome is not Outcome.FINISHED:
        end(started)
    end(rank_processes.verdict(ending_of(lambda: _work(attempt.run_dir, arguments.entry, heartbeat))))


def _redirect_output(attempt: AttemptDir) -> None:
    """Away from the controller's terminal, also of the processes that this one starts."""
    with writing(attempt.run_dir, attempt.root):
        for descriptor, path in enumerate((Path(os.devnull), attempt.stdout, attempt.stderr)):
            opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            os.dup2(opened, descriptor)
            os.close(opened)


def _work(run_dir: Path, entry: str, heartbeat: Heartbeat) -> str | None:
    with _listening(heartbeat):
        work = load_entry(entry)
        _wait_until_free(RunDir(run_dir))
        heartbeat.beat()
        return work(str(run_dir), heartbeat.is_interrupted)


def _wait_until_free(run: RunDir) -> None:
    gives_up_at = time.monotonic() + LOCK_TIMEOUT_S
    while run.is_locked():
        if time.monotonic() > gives_up_at:
            raise RunBusyError(
                f"expected a run that no other process works on, found that one still works on {run.root} after "
                f"{LOCK_TIMEOUT_S:.0f} s; end it, then resume the run"
            )
        time.sleep(WATCH_INTERVAL_S)


@contextlib.contextmanager
def _listening(heartbeat: Heartbeat) -> Iterator[None]:
    """Handle the stop signals that were blocked until now; a repeated signal changes nothing."""
    try:
        for number in HELD_SIGNALS:
            signal.signal(number, heartbeat.on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
        yield
    finally:
        for number in HELD_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def _outlive(zygote: int, grace_s: float) -> None:
    """Once the controller is dead, and with it the zygote: stop, and be gone after the grace."""
    while os.getppid() == zygote:
        time.sleep(WATCH_INTERVAL_S)
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGTERM)
    time.sleep(grace_s)
    _kill_rest_of_session()
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_rest_of_session() -> None:
    while not kill_session(os.getpid(), spare=os.getpid()):
        time.sleep(0.01)
    remove_rendezvous()
