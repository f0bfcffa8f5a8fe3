"""The first process of an executor on this machine, and its first rank; forked by a zygote.

It carries out the orders of its cluster (:mod:`alto.cluster.hosting`), writes how each run ended, and leaves no process
behind. SIGTERM makes it save and end. If the controller that started it dies, it saves and ends within a grace period.
An executor of several ranks works on one run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from alto.cluster.attempt import AttemptDir, exit_code_of
from alto.cluster.base import Ending
from alto.cluster.host import RunEnd, ending_of, work_alone
from alto.cluster.hosting import (
    IDLE_INTERVAL_S,
    LOCK_TIMEOUT_S,
    Heartbeat,
    OrderLoop,
    StopRequest,
    redirect_output,
    run_is_busy,
)
from alto.cluster.orders import Orders, WorkOrder
from alto.cluster.processes import kill_session
from alto.cluster.rank_processes import RANK_WATCH_INTERVAL_S, RankProcesses
from alto.cluster.rendezvous import remove_rendezvous
from alto.runs import RunDir


def main() -> None:
    """Carry out orders, then end this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("orders", type=Path, help="the folder of this process")
    parser.add_argument("--grace-s", type=float, required=True, help="for saving, once the controller has died")
    parser.add_argument("--parent", type=int, required=True, help="the zygote's process")
    arguments = parser.parse_args()
    Path("/proc/self/comm").write_text("alto-executor")  # for ps and top
    orders, request = Orders(arguments.orders), StopRequest()
    outlive = threading.Thread(
        target=_exit_after_zygote, args=(arguments.parent, arguments.grace_s, arguments.orders), daemon=True
    )
    size = int(os.environ["WORLD_SIZE"])
    if size > 1:
        _work_as_first_rank(orders, request, size, outlive)
    outlive.start()
    with request.listening():
        code = OrderLoop(orders, request).run()
    _exit(code)


def _work_as_first_rank(orders: Orders, request: StopRequest, size: int, outlive: threading.Thread) -> NoReturn:
    """Work on one run together with other ranks, which are forked before this process has other threads."""
    order = _first(orders)
    attempt = order.attempt
    has_ended = threading.Lock()

    def end(ending: Ending) -> NoReturn:
        """Record how the work ended, and exit. Only the first call counts: the work's end or a rank's death."""
        has_ended.acquire()
        is_written = False
        try:
            is_written = orders.report(order, ending, is_reusable=False)
        finally:
            _exit(exit_code_of(ending, is_written=is_written))

    rank_processes = RankProcesses(attempt, order.ticket, size, on_death=end)
    try:
        redirect_output(attempt)
        rank_processes.start()
    except BaseException as error:
        end(ending_of(RunEnd(error=error)))
    outlive.start()
    with request.listening():
        ending = _work(order, request)
    end(rank_processes.verdict(ending))


def _first(orders: Orders) -> WorkOrder:
    while True:
        for order in orders.new():
            if isinstance(order, WorkOrder):
                return order
        time.sleep(IDLE_INTERVAL_S)


def _work(order: WorkOrder, request: StopRequest) -> Ending:
    heartbeat = Heartbeat(order.attempt, request)
    try:
        with request.interrupting():
            _wait_until_free(order.attempt)
            heartbeat.beat()
            return work_alone(order.ticket, heartbeat.is_interrupted)
    except BaseException as error:
        return ending_of(RunEnd(error=error))


def _wait_until_free(attempt: AttemptDir) -> None:
    gives_up_at = time.monotonic() + LOCK_TIMEOUT_S
    while RunDir(attempt.run_dir).is_locked():
        if time.monotonic() > gives_up_at:
            raise run_is_busy(attempt)
        time.sleep(RANK_WATCH_INTERVAL_S)


def _exit(code: int) -> NoReturn:
    """End this process and every process that was started here. Everything is reported and saved by now; threads and
    exit handlers of libraries must not keep the devices."""
    while not kill_session(os.getpid(), spare=os.getpid()):
        time.sleep(0.01)
    remove_rendezvous()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _exit_after_zygote(zygote: int, grace_s: float, orders: Path) -> None:
    """Wait until the zygote dies, as it does with the controller; then stop, and kill this process after the grace
    period."""
    while os.getppid() == zygote:
        time.sleep(RANK_WATCH_INTERVAL_S)
    shutil.rmtree(orders, ignore_errors=True)  # its reader is dead
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGTERM)
    time.sleep(grace_s)
    while not kill_session(os.getpid(), spare=os.getpid()):
        time.sleep(0.01)
    remove_rendezvous()
    os.kill(os.getpid(), signal.SIGKILL)
