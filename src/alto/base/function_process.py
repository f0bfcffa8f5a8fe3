"""Calls of a function that a user names, in a process of its own: it cannot block, end or change the calling process.

The process answers JSON messages on a connection (:func:`serve`). It imports nothing of ALTO but this package.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_PROGRAM = f"import sys; sys.path[:] = sys.argv[3:]; from {__name__} import serve; serve(int(sys.argv[1]), sys.argv[2])"
_POLL_S = 0.05
_START_S = 60.0
"""Maximum seconds to import the function's module."""


class FunctionFailedError(Exception):
    """Raised when a function does not return a result; the message says why."""


class FunctionRaisedError(FunctionFailedError):
    """Raised when a function raises an error of its own."""


class FunctionProcess:
    """A process that calls one function, started at the first call and again after it was ended.

    Args:
        name: ``module:function`` or ``module.function``; see :func:`_search_path` for where it is searched for.
        timeout_s: Maximum seconds of a call. A call that takes longer ends the process.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name = name
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def start(self, on_turn: Callable[[], None] = lambda: None) -> None:
        """Start the process, unless it runs.

        Args:
            on_turn: Called regularly while this waits; its exceptions are raised from here.

        Raises:
            FunctionFailedError: The function cannot be imported.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        ours, theirs = _pair()
        with theirs:
            self._process = subprocess.Popen(
                # -P: the current folder does not come before the standard library.
                [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()), self.name, *_search_path()],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what the function prints is no output of this program
                start_new_session=True,
            )
        self._connection = ours
        try:
            self._answer(_START_S, on_turn)
        except FunctionFailedError:
            self.close()
            raise

    def call(self, arguments: dict[str, Any], on_turn: Callable[[], None] = lambda: None) -> Any:
        """Return the result of the function, called with keyword ``arguments``, as JSON has it.

        Args:
            on_turn: Called regularly while this waits; its exceptions are raised from here.

        Raises:
            FunctionRaisedError: The function raised an error, or returned no JSON value.
            FunctionFailedError: It did not return in time, or ended its process.
        """
        self.start(on_turn)
        assert self._connection is not None
        with contextlib.suppress(BrokenPipeError, ConnectionError):  # the missing answer says why
            self._connection.send_bytes(json.dumps(arguments).encode())
        return self._answer(self._timeout_s, on_turn)

    def close(self) -> None:
        """End the process and everything that it started."""
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _answer(self, timeout_s: float, on_turn: Callable[[], None]) -> Any:
        assert self._connection is not None
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        try:
            while not self._connection.poll(max(0.0, min(_POLL_S, deadline - time.monotonic()))):
                on_turn()
                if time.monotonic() >= deadline:
                    raise FunctionFailedError(f"no result within {timeout_s:g} s")
            answer = json.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError):
            code = self._process.wait()
            self.close()
            raise FunctionFailedError(f"it ended its process (exit code {code})") from None
        except BaseException:
            self.close()
            raise
        if "error" in answer:
            raise (FunctionRaisedError if answer["is_raised"] else FunctionFailedError)(answer["error"])
        return answer["result"]


def _search_path() -> list[str]:
    """Return the folders in which a function's module is searched for: the standard library, the current folder, and
    the others of this process. So a file ``json.py`` of the user does not replace the module ``json``."""
    platform = sysconfig.get_path("platstdlib")
    standard = {sysconfig.get_path("stdlib"), platform, str(Path(platform, "lib-dynload"))}
    folders = dict.fromkeys([os.getcwd(), *filter(None, sys.path)])
    return sorted(folders, key=lambda folder: folder not in standard)


def _pair() -> tuple[Connection, Connection]:
    ours, theirs = socket.socketpair()
    return Connection(ours.detach()), Connection(theirs.detach())


def described_error(error: BaseException) -> str:
    """Describe an error: its type, its message, and the file and line where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    try:
        message = str(error)
    except Exception:
        message = ""
    return f"{type(error).__name__}{': ' if message else ''}{message:.200}{place}"


def imported_function(name: str) -> Callable[..., Any]:
    """Return the function called ``name``.

    Raises:
        FunctionFailedError: Its module cannot be imported, or has no such function.
    """
    module_name, _, function_name = name.partition(":") if ":" in name else name.rpartition(".")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise FunctionFailedError(
            f"expected a module {module_name!r} that can be imported, found {described_error(error)}"
        ) from error
    for part in function_name.split("."):
        found = getattr(found, part, None)
    function: Callable[..., Any] | None = found if callable(found) else None
    if function is None:
        raise FunctionFailedError(
            f"expected a function {function_name!r} in the module {module_name!r}, found "
            f"{'none' if found is None else type(found).__name__}"
        )
    return function


def serve(handle: int, name: str) -> None:
    """Import the function called ``name``, and call it for every message until the connection ends.

    Args:
        handle: File descriptor of the connection.
    """
    connection, function = Connection(handle), None
    with contextlib.suppress(EOFError, ConnectionError):  # the calling process has ended
        while True:
            try:
                if function is None:
                    function, result = imported_function(name), None
                else:
                    result = function(**json.loads(connection.recv_bytes()))
                answer = json.dumps({"result": result}, default=_number)
            except (EOFError, ConnectionError):
                return
            except BaseException as error:  # includes SystemExit
                is_raised = not isinstance(error, FunctionFailedError)
                text = f"it raised {described_error(error)}" if is_raised else str(error)
                answer = json.dumps({"error": text, "is_raised": is_raised})
            connection.send_bytes(answer.encode())
            if function is None:
                return


def _number(value: Any) -> Any:
    """Convert an array or a number of another library, such as a tensor, to a list or a float for JSON."""
    return value.tolist() if hasattr(value, "tolist") else float(value)
