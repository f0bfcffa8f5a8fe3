"""A process that has imported the modules that executors need, and forks executors so that they need not import them.

The cluster uses :class:`Zygote`. ``python -m alto.cluster.zygote`` is the process: it answers requests on a socket
until the socket is closed, and then exits. It imports the modules that requests name, which are the same for all
executors of a queue. It never uses a GPU, because a process that is forked after CUDA has been initialised cannot use
CUDA.

Messages are lines of JSON. To the zygote: ``{"fork": id, "module": ..., "uses": [...], "args": [...], "env": {...},
"cwd": ..., "limits": {...}}`` and ``{"reap": id}``. From it: ``{"forked": id, "pid": ...}``, ``{"exited": id,
"code": ...}`` (negative for a signal), ``{"failed": id, "reason": ...}``, ``{"reaped": id}``. A process that has exited
keeps its process id until it is reaped.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from alto.cluster.processes import HELD_SIGNALS

READ_BY_IMPORTS = (
    "PYTHON",
    "HF_",
    "TRANSFORMERS_",
    "TORCH",
    "PYTORCH_",
    "TRITON_",
    "LD_",
    "OPENBLAS_",
    "MKL_",
)
"""Prefixes of environment variables that libraries may read when they are imported."""

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""A process that forks must have no other threads, because its children would inherit their locks. Children set their
own numbers of threads."""

PARENT_INTERVAL_S = 0.2
"""Interval at which the zygote checks that its parent lives: the socket stays open if another process holds the
parent's end as well."""


class ForkedProcess:
    """A process that a zygote was asked to fork, in its own session.

    Attributes:
        pid: None until the process is forked.
        has_exited: Whether the process has exited, could not be forked, or was lost with its zygote.
        is_reaped: Whether nothing is left of the process, not even its process id.
        exit_code: Negative for a signal; None if unknown.
        reason: Why the process could not be forked; empty if it was forked.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.pid: int | None = None
        self.has_exited = False
        self.is_reaped = False
        self.exit_code: int | None = None
        self.reason = ""
        self._pidfd: int | None = None

    def forked(self, pid: int) -> None:
        """Record that the process runs."""
        self.pid = pid
        with contextlib.suppress(OSError):  # the process is gone, or this kernel has no pidfd
            self._pidfd = os.pidfd_open(pid)

    def exited(self, code: int | None, reason: str = "") -> None:
        """Record that the process has exited."""
        self.has_exited, self.exit_code, self.reason = True, code, reason
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def look_for_its_end(self) -> None:
        """Poll the operating system for this process. Used after the zygote is gone, because nothing else reports the
        exit then.
        """
        if self._pidfd is None:
            if not Path(f"/proc/{self.pid}").exists():
                self.exited(None)
            return
        with selectors.DefaultSelector() as selector:
            selector.register(self._pidfd, selectors.EVENT_READ)  # readable once the process has exited
            if selector.select(0):
                self.exited(None)


class Zygote:
    """Forks processes from one that has imported everything they need.

    The zygote process starts at the first fork and exits together with the current process. Use :meth:`shared`, from
    any thread.
    """

    _shared: ClassVar[Zygote | None] = None
    _sharing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._environment = _environment_of_imports()
        self._server: _Started | None = None
        self._num_forked = 0
        self._running: dict[int, ForkedProcess] = {}
        self._orphans: list[ForkedProcess] = []

    @classmethod
    def shared(cls) -> Zygote:
        """Return the zygote of this process; a new one if environment variables that imports read have changed.

        Processes forked by an earlier zygote are still watched through it.
        """
        with cls._sharing:
            found = cls._shared
            is_ours = found is not None and found._owner == os.getpid()  # a forked process needs its own
            if found is None or not is_ours or found._environment != _environment_of_imports():
                cls._shared = found = cls()
            return found

    def fork(
        self, module: str, args: Sequence[str], env: Mapping[str, str], *, uses: Sequence[str] = ()
    ) -> ForkedProcess:
        """Run ``main()`` of ``module`` in a new process; return at once.

        Args:
            args: ``sys.argv`` after the program's name; the zygote appends ``--parent`` and its process id.
            env: The complete environment of the process.
            uses: Modules that the zygote imports first if it has not imported them yet; they must not start threads.
                Import errors are left to the new process.

        Raises:
            OSError: The zygote itself cannot be started.
        """
        request = {
            "module": module,
            "uses": list(uses),
            "args": list(args),
            "env": dict(env),
            "cwd": os.getcwd(),
            "limits": _limits(),
        }
        with self._lock:
            self._start()
            self._num_forked += 1
            forked = ForkedProcess(self._num_forked)
            self._running[forked.number] = forked
            self._send({"fork": forked.number, **request})
            return forked

    def poll(self) -> None:
        """Process the messages that the zygote has sent."""
        with self._lock:
            if self._server is not None:
                for message in self._server.channel.receive():
                    self._handle(message)
                if self._server.channel.is_closed:
                    self._handle_death()
            for forked in list(self._orphans):
                forked.look_for_its_end()
                if forked.has_exited:
                    self._orphans.remove(forked)

    def reap(self, forked: ForkedProcess) -> None:
        """Release the process id of a process that has exited; :meth:`poll` notes when that is done."""
        with self._lock:
            if forked.number in self._running:
                self._send({"reap": forked.number})
            else:
                forked.is_reaped = True  # it was never forked, or its zygote has died

    def close(self) -> None:
        """Stop the zygote process; its children notice that their parent is gone."""
        with self._lock:
            if self._server is not None:
                self._server.close()
                self._server = None

    def _start(self) -> None:
        if self._server is not None and self._server.process.poll() is not None:
            self._handle_death()
        if self._server is None:
            self._server = _Started()
            weakref.finalize(self, self._server.close)

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._server is not None:
            self._server.channel.send(message)
            if self._server.channel.is_closed:
                self._handle_death()

    def _handle(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"forked": number, "pid": pid}:
                self._running[number].forked(pid)
            case {"exited": number, "code": code}:
                self._running[number].exited(code)
            case {"failed": number, "reason": reason}:
                self._running.pop(number).exited(None, reason)
            case {"reaped": number}:
                self._running.pop(number).is_reaped = True

    def _handle_death(self) -> None:
        """Handle the death of the zygote: its children run until they notice it; requests that it had not read fail."""
        assert self._server is not None
        last_log_line = self._server.last_log_line()
        for forked in self._running.values():
            if forked.pid is None:
                forked.exited(None, f"the process that starts executors has died{last_log_line}")
            elif not forked.has_exited:
                self._orphans.append(forked)
        self._running = {}
        self.close()


class _Started:
    """The process of a zygote, as seen by its parent.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process lives
        ours, theirs = socket.socketpair()
        self.channel = _Channel(ours)
        with theirs:
            try:
                self.process = subprocess.Popen(
                    (sys.executable, "-m", "alto.cluster.zygote", str(theirs.fileno())),
                    pass_fds=(theirs.fileno(),),
                    env=os.environ | _ONE_THREAD,
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    start_new_session=True,  # only the controller handles ctrl-C of the terminal
                )
            except OSError:
                self.channel.close()
                self._log.close()
                raise

    def last_log_line(self) -> str:
        """Return the end of a sentence that says why the process died; empty if it printed nothing."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return f"; it printed: {lines[-1].strip()}" if lines else ""

    def close(self) -> None:
        """Kill the process; it may be importing, and has nothing to save."""
        self.channel.close()
        self.process.kill()
        self.process.wait()
        self._log.close()


def _limits() -> dict[str, tuple[int, int]]:
    """Return soft and hard limits of this process's resources, as ``ulimit`` sets them, by name."""
    return {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}


def _environment_of_imports() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(READ_BY_IMPORTS)}


class _Channel:
    """One end of a socket that carries messages."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.is_closed = False
        self._unread = b""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send the complete message; if the other end is closed, close this end too."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.is_closed = True

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have come since the last call, without waiting for more."""
        while not self.is_closed:
            try:
                found = self.socket.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                found = b""
            self._unread += found
            self.is_closed = not found
        *lines, self._unread = self._unread.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self.is_closed = True
        self.socket.close()


def main() -> None:
    """Carry out requests until the cluster's process has closed the socket or exited."""
    parent = os.getppid()
    requests = _Channel(socket.socket(fileno=int(sys.argv[1])))
    Path("/proc/self/comm").write_text("alto-zygote")  # for ps and top
    for number in HELD_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _ForkLoop(requests, parent).run()


class _ForkLoop:
    """The zygote itself: one thread, which waits for requests and for its children to exit."""

    def __init__(self, requests: _Channel, parent: int) -> None:
        self._requests = requests
        self._parent = parent
        self._numbers: dict[int, int] = {}
        self._exited: dict[int, int] = {}
        self._wakeup_read, self._wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_write)
        with selectors.DefaultSelector() as selector:
            selector.register(self._requests.socket, selectors.EVENT_READ)
            selector.register(self._wakeup_read, selectors.EVENT_READ)
            while not self._requests.is_closed and os.getppid() == self._parent:
                selector.select(PARENT_INTERVAL_S)
                with contextlib.suppress(BlockingIOError):
                    while os.read(self._wakeup_read, 512):
                        pass
                for request in self._requests.receive():
                    self._handle_request(request)
                self._report_exits()

    def _handle_request(self, request: Mapping[str, Any]) -> None:
        if "reap" in request:
            pid = self._exited.pop(request["reap"])
            os.waitpid(pid, 0)
            self._requests.send({"reaped": request["reap"]})
            return
        self._import(request["uses"])
        try:
            pid = self._fork(request)
        except OSError as error:
            self._requests.send({"failed": request["fork"], "reason": f"it cannot be started: {error}"})
            return
        self._numbers[pid] = request["fork"]
        self._requests.send({"forked": request["fork"], "pid": pid})

    def _import(self, modules: Sequence[str]) -> None:
        missing = [module for module in modules if module not in sys.modules]
        for module in missing:
            with contextlib.suppress(Exception):  # the process that needs it meets the same error and reports it
                importlib.import_module(module)
        if missing:
            gc.collect()
            gc.freeze()  # keeps children's garbage collectors from writing to shared memory pages

    def _fork(self, request: Mapping[str, Any]) -> int:
        # Stop signals wait until the new process listens.
        mask, parent = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS), os.getpid()
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return pid
        try:
            self._become(request, parent)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _become(self, request: Mapping[str, Any], parent: int) -> None:
        """Become the requested process; never returns."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in HELD_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        self._requests.close()
        os.close(self._wakeup_read)
        os.close(self._wakeup_write)
        os.setsid()
        if sys.path[0] == os.getcwd():  # as python -m sets it
            sys.path[0] = request["cwd"]
        os.chdir(request["cwd"])
        for name, limits in request["limits"].items():
            with contextlib.suppress(OSError, ValueError):  # a hard limit is never raised
                resource.setrlimit(getattr(resource, name), limits)
        os.environ.clear()
        os.environ.update(request["env"])
        for stream in (sys.stdout, sys.stderr):
            assert isinstance(stream, io.TextIOWrapper)
            stream.reconfigure(write_through=True)  # so that the log of a killed process is complete
        if (torch := sys.modules.get("torch")) is not None:  # otherwise it reads the variable when it is imported
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
        sys.argv = [request["module"], *request["args"], "--parent", str(parent)]
        importlib.import_module(request["module"]).main()

    def _report_exits(self) -> None:
        for pid, number in list(self._numbers.items()):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                del self._numbers[pid]
                self._exited[number] = pid
                is_signal = ended.si_code != os.CLD_EXITED
                self._requests.send({"exited": number, "code": -ended.si_status if is_signal else ended.si_status})


if __name__ == "__main__":
    main()
