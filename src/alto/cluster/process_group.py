"""The processes of one executor, started and watched with torch elastic."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

from alto.cluster.processes import HELD_SIGNALS, kill_session

__all__ = ["ProcessGroup"]


class ProcessGroup:
    """A session of its own for a Python module; every process that it starts belongs to it too.

    Args:
        name: For torch elastic's messages.
        module: What is run, as by ``python -m``. `HELD_SIGNALS` are blocked until it unblocks them.
        args: Arguments of the module.
        env: Added to this process's environment.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(self, name: str, module: str, args: Sequence[str], *, env: Mapping[str, str]) -> None:
        with _own_signal_handlers():
            self._context = start_processes(
                name=name,
                entrypoint=sys.executable,
                args={0: ("-m", module, *args)},
                envs={0: dict(env)},
                logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # the executor redirects its own output
            )
        self.leader = self._context.pids()[0]
        self._exit_code: int | None = None

    def has_ended(self) -> bool:
        """Whether no process of it lives; where the first has died, the others are killed."""
        if self._exit_code is not None:
            return True
        # Not reaped yet, it keeps its process id, so that no other session can have the same id.
        with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored, the kernel has reaped it
            if os.waitid(os.P_PID, self.leader, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
        if not kill_session(self.leader):
            return False
        with _without_messages():
            result = self._context.wait(timeout=0)
        assert result is not None
        self._exit_code = result.failures[0].exitcode if result.failures else 0
        return True

    @property
    def exit_code(self) -> int:
        """Of its first process, negative for a signal."""
        assert self._exit_code is not None, "it runs"
        return self._exit_code

    def ask_to_stop(self) -> None:
        """SIGTERM to the first process alone: those it started work for it until it has saved."""
        if self._exit_code is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the kernel has reaped it
                os.kill(self.leader, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to all of its processes; :meth:`has_ended` returns whether they are gone."""
        if self._exit_code is None:
            kill_session(self.leader)


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep this process's signal handlers: called on the main thread, torch elastic puts its own in their place and
    leaves them there; on another it only warns that it cannot. The new process inherits the mask of this thread."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in HELD_SIGNALS} if is_main else {}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
    try:
        with _without_messages():
            yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def _without_messages() -> Iterator[None]:
    """Torch elastic prints every process that died; the queue reports it, and why."""
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
