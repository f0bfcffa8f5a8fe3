"""The processes of one executor: a session whose first process a zygote forks."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence

from alto.cluster.processes import kill_session
from alto.cluster.zygote import Zygote

__all__ = ["ProcessGroup"]


class ProcessGroup:
    """A separate session for a Python module; all processes started in it belong to it too.

    Args:
        zygote: Forks the first process.
        module: Module whose ``main()`` is run. `HELD_SIGNALS` are blocked until it unblocks them.
        args: Command-line arguments.
        env: Added to this process's environment.
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
        """Return whether none of its processes lives; if the first has died, kill the others."""
        if self._has_ended:
            return True
        self._zygote.poll()
        if not self._first.has_exited:
            self._signal()
            return False
        # Until it is reaped, it keeps its process id, so that no other session can have the same id.
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
        """Send SIGTERM to the first process only, once it is forked; until it has saved, it needs the others."""
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
