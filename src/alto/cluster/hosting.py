"""Works on the runs that the cluster assigns to this process: one after the other, or several at the same time."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from alto.base import writing
from alto.cluster.attempt import AttemptDir, exit_code_of
from alto.cluster.base import Ending, Outcome
from alto.cluster.host import Host, HostedRun, RunEnd, ending_of, load_host
from alto.cluster.orders import Orders, WorkOrder
from alto.cluster.processes import HELD_SIGNALS
from alto.errors import RunBusyError, RunWriteError
from alto.runs import RunDir

LOCK_TIMEOUT_S = 60.0
"""Longest wait for a run's lock: an executor whose controller was killed may still hold it for a while."""

BEAT_INTERVAL_S = 0.5
IDLE_INTERVAL_S = 0.02


class StopRequest:
    """Records whether a signal has asked this process to stop."""

    def __init__(self) -> None:
        self.is_set = False
        self._interrupts = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the stop signals that were blocked until now; a repeated signal changes nothing."""
        try:
            for number in HELD_SIGNALS:
                signal.signal(number, self._on_signal)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
            yield
        finally:
            for number in HELD_SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Let a signal raise `KeyboardInterrupt` inside until :meth:`check` is first called: no work can be lost."""
        self._interrupts = True
        try:
            if self.is_set:
                raise KeyboardInterrupt
            yield
        finally:
            self._interrupts = False

    def check(self) -> bool:
        """Return whether a signal has come; from now on signals raise nothing."""
        self._interrupts = False
        return self.is_set

    def _on_signal(self, _: int, __: FrameType | None) -> None:
        self.is_set = True
        if self._interrupts:
            self._interrupts = False
            raise KeyboardInterrupt


class Heartbeat:
    """Checks whether one attempt must stop. Each check is also its heartbeat."""

    def __init__(self, attempt: AttemptDir, request: StopRequest) -> None:
        self.is_stopping = False
        self._attempt = attempt
        self._request = request
        self._beats_at = 0.0

    def is_interrupted(self) -> bool:
        """Touch the heartbeat, and return whether the attempt must stop."""
        self.beat()
        return self._request.check() or self.is_stopping

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


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """An attempt at a run that this process works on.

    Attributes:
        host_class: The class that the order names.
        host: Works on the run; None while the attempt waits for the run's lock.
        waits_until: Time at which waiting for the lock is given up.
    """

    order: WorkOrder
    host_class: type[Host]
    heartbeat: Heartbeat
    waits_until: float
    host: Host | None = None

    @property
    def dir(self) -> AttemptDir:
        return self.order.attempt


class OrderLoop:
    """Carries out orders until this process is asked to stop, or an unknown error makes it unsafe to reuse. It then
    starts no other runs, and ends after its current runs."""

    def __init__(self, orders: Orders, request: StopRequest) -> None:
        self._orders = orders
        self._request = request
        self._attempts: dict[int, _Attempt] = {}
        self._hosts: dict[str, Host] = {}
        self._is_reusable = True
        self._exit_code = 0

    def run(self) -> int:
        """Carry out orders; return the exit code of this process."""
        self._direct_output()
        while True:
            if self._is_reusable or self._request.is_set:
                self._take_orders()
                self._begin_waiting()
            for host in self._hosts.values():
                self._turn(host)
            if not any(attempt.host for attempt in self._attempts.values()):
                if self._request.is_set or not self._is_reusable:
                    return self._exit_code
                time.sleep(IDLE_INTERVAL_S)

    # -- orders ----------------------------------------------------------------------------------------------------

    def _take_orders(self) -> None:
        for order in self._orders.new():
            if isinstance(order, WorkOrder):
                self._take(order)
            elif order.stopped in self._attempts:
                self._attempts[order.stopped].heartbeat.is_stopping = True

    def _take(self, order: WorkOrder) -> None:
        _direct_to(order.attempt)
        try:
            host_class = load_host(order.ticket.host)
        except BaseException as error:
            self._report(order, ending_of(RunEnd(error=error)))
            return
        self._attempts[order.number] = _Attempt(
            order=order,
            host_class=host_class,
            heartbeat=Heartbeat(order.attempt, self._request),
            waits_until=time.monotonic() + LOCK_TIMEOUT_S,
        )
        self._direct_output()

    def _begin_waiting(self) -> None:
        """Start the attempts whose runs no other process works on."""
        for attempt in [attempt for attempt in self._attempts.values() if attempt.host is None]:
            if self._request.is_set or attempt.heartbeat.is_stopping:
                self._end(attempt, RunEnd(error=KeyboardInterrupt()))
            elif not RunDir(attempt.dir.run_dir).is_locked():
                self._begin(attempt)
            elif time.monotonic() > attempt.waits_until:
                self._end(attempt, RunEnd(error=run_is_busy(attempt.dir)))

    def _begin(self, attempt: _Attempt) -> None:
        """Hand a run to its host."""
        # While other runs are trained, a signal must not interrupt a change that concerns them too.
        is_alone = len(self._attempts) == 1
        number, ticket = attempt.order.number, attempt.order.ticket
        try:
            with self._request.interrupting() if is_alone else contextlib.nullcontext():
                _direct_to(attempt.dir)
                attempt.heartbeat.beat()
                if ticket.host not in self._hosts:
                    self._hosts[ticket.host] = attempt.host_class()
                attempt.host = self._hosts[ticket.host]
                is_interrupted = attempt.heartbeat.is_interrupted
                attempt.host.attach(HostedRun(number=number, ticket=ticket, is_interrupted=is_interrupted))
        except BaseException as error:
            self._end(attempt, RunEnd(error=error))

    # -- work ------------------------------------------------------------------------------------------------------

    def _turn(self, host: Host) -> None:
        if any(attempt.host is host for attempt in self._attempts.values()):
            for number, end in host.turn().items():
                self._end(self._attempts[number], end)

    def _end(self, attempt: _Attempt, end: RunEnd) -> None:
        del self._attempts[attempt.order.number]
        _direct_to(attempt.dir)
        self._report(attempt.order, ending_of(end))

    def _report(self, order: WorkOrder, ending: Ending) -> None:
        # An unknown error may have left anything behind.
        is_clean = ending.outcome is not Outcome.LOST and not order.ticket.trust_remote_code
        is_clean = is_clean and all(host.is_usable for host in self._hosts.values())
        self._is_reusable = self._is_reusable and is_clean and not self._request.is_set
        is_reported = self._orders.report(order, ending, is_reusable=self._is_reusable)
        if not self._attempts:
            self._exit_code = exit_code_of(ending, is_written=is_reported)
            self._is_reusable = self._is_reusable and is_reported
        self._direct_output()

    def _direct_output(self) -> None:
        """Print to the log of the attempt if there is only one, so that no run's log has the output of another."""
        alone = next(iter(self._attempts.values())).dir if len(self._attempts) == 1 else None
        with contextlib.suppress(RunWriteError, OSError):  # output then stays where it was
            if alone is not None:
                redirect_output(alone)
            else:
                _redirect(self._orders.output, self._orders.output)


def redirect_output(attempt: AttemptDir) -> None:
    """Print to the logs of an attempt from now on, also from processes started by this one.

    Raises:
        RunWriteError: The run's disk cannot be written.
    """
    with writing(attempt.run_dir, attempt.root):
        _redirect(attempt.stdout, attempt.stderr)


def _direct_to(attempt: AttemptDir) -> None:
    """Print to the logs of an attempt from now on; if its disk cannot be written, output stays where it was."""
    with contextlib.suppress(RunWriteError):
        redirect_output(attempt)


def _redirect(stdout: Path, stderr: Path) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for descriptor, path in enumerate((Path(os.devnull), stdout, stderr)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(opened, descriptor)
        os.close(opened)


def run_is_busy(attempt: AttemptDir) -> RunBusyError:
    """Return the error for an attempt at a run that another process keeps locked."""
    return RunBusyError(
        f"expected a run that no other process works on, found that another process has held {attempt.run_dir} for "
        f"{LOCK_TIMEOUT_S:.0f} s; end that process, then resume the run"
    )
