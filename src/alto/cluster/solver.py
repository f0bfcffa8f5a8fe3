"""Makes schedules in a separate process, so that a crash or hang of the solver affects nothing else.

``python -m alto.cluster.solver`` reads calls of :func:`schedule_tasks` from stdin and writes their results to stdout,
as JSON, until stdin ends. Loading the solver takes a second or more, so the process is kept for the queue's many plans.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Self, TypeVar

from pydantic import TypeAdapter

from alto.cluster.host import error_class
from alto.errors import AltoError, UnsupportedError
from alto.records import Schedule
from alto.scheduler import LIST_METHODS, SchedulingProblem, schedule_tasks

FALLBACK = "lpt"

_PATIENCE = 0.01
"""Time limit of the solver as a share of the makespan's lower bound; a better schedule rarely saves more than that."""
_LEAST_PATIENCE_S = 0.2


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverCall:
    """The arguments of :func:`alto.scheduler.schedule_tasks`."""

    problem: SchedulingProblem
    method: str
    time_limit_s: float
    hint: Schedule | None
    gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverAnswer:
    """The schedule; or class and message of the ALTO error that was raised.

    Attributes:
        schedule: None after an error.
        error: Class of the error; empty if there is none.
    """

    schedule: Schedule | None = None
    error: str = ""
    message: str = ""


CALLS, ANSWERS = TypeAdapter(SolverCall), TypeAdapter(SolverAnswer)


def encoded(codec: TypeAdapter[T], value: T) -> bytes:
    return json.dumps(codec.dump_python(value)).encode()


def decoded(codec: TypeAdapter[T], text: bytes) -> T:
    return codec.validate_python(json.loads(text))


class GuardedSolver:
    """Schedules by ``method``; if that fails, by list scheduling, with a notice in the schedule.

    A process that crashed or was killed is replaced at the next call.

    Args:
        time_limit_s: Longest time of the solver; less if all tasks are short.
        gap: See :func:`alto.scheduler.schedule_tasks`.
        grace_s: Time beyond the limit, for starting the process and everything else, before it counts as hung.
    """

    def __init__(self, method: str, *, time_limit_s: float, gap: float = 0.0, grace_s: float = 30.0) -> None:
        self._method = method.lower()
        self._gap = gap
        self._time_limit_s = time_limit_s
        self._grace_s = grace_s
        self._process: _Process | None = None

    def __call__(self, problem: SchedulingProblem, hint: Schedule | None = None) -> Schedule:
        """Return a schedule of the waiting tasks of ``problem``.

        Raises:
            SpecError: The method is unknown.
        """
        if self._method in LIST_METHODS or not problem.pending:
            return schedule_tasks(problem, method=self._method if self._method in LIST_METHODS else FALLBACK)
        limit_s = min(self._time_limit_s, max(_LEAST_PATIENCE_S, _PATIENCE * _least_makespan_s(problem)))
        call = SolverCall(problem=problem, method=self._method, time_limit_s=limit_s, hint=hint, gap=self._gap)
        try:
            if self._process is None:
                self._process = _Process()
        except OSError as error:
            return self._fallback(problem, f"the solver's process could not be started ({error})")
        try:
            answer = self._process.ask(call, timeout_s=limit_s + self._grace_s)
        except TimeoutError:
            self.close()
            return self._fallback(problem, f"the solver did not answer within {limit_s:g} s and was killed")
        except (EOFError, OSError):
            code = self._process.end()
            self._process = None
            return self._fallback(problem, f"the solver's process ended with code {code}")
        except BaseException:
            self.close()  # otherwise its answer would be read as the answer to the next call
            raise
        failure = error_class(answer.error)
        if failure is UnsupportedError:
            return self._fallback(problem, answer.message)
        if failure is not None:
            raise failure(answer.message)
        assert answer.schedule is not None
        return answer.schedule

    def close(self) -> None:
        """End the solver's process; a later call starts another."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fallback(self, problem: SchedulingProblem, why: str) -> Schedule:
        return replace(schedule_tasks(problem, method=FALLBACK), notice=f"scheduled by {FALLBACK}: {why}")


def _least_makespan_s(problem: SchedulingProblem) -> float:
    """Return a lower bound of the waiting tasks' makespan: their GPU seconds divided by the number of GPUs."""
    work = sum(task.num_gpus * task.duration_s for task in problem.pending)
    return work / max(1, sum(len(node.gpus) for node in problem.nodes))


class _Process:
    """The solver's process, in its own session, so that signals to this process do not reach it."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "alto.cluster.solver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._calls = Connection(os.dup(self._popen.stdin.fileno()), readable=False)
        self._outcomes = Connection(os.dup(self._popen.stdout.fileno()), writable=False)
        self._popen.stdin.close()
        self._popen.stdout.close()

    def ask(self, call: SolverCall, *, timeout_s: float) -> SolverAnswer:
        """Return the answer to ``call``.

        Raises:
            TimeoutError: There is no answer in time.
            EOFError, OSError: The process is gone.
        """
        self._calls.send_bytes(encoded(CALLS, call))
        if not self._outcomes.poll(timeout_s):
            raise TimeoutError
        return decoded(ANSWERS, self._outcomes.recv_bytes())

    def kill(self) -> None:
        self._popen.kill()
        self.end()

    def end(self) -> int:
        """Reap a process that has ended or is about to; return its exit code."""
        self._calls.close()
        self._outcomes.close()
        return self._popen.wait()


def _serve() -> None:
    calls, outcomes = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # keeps other output out of the answers
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            outcomes.send_bytes(encoded(ANSWERS, _answer(decoded(CALLS, calls.recv_bytes()))))


def _answer(call: SolverCall) -> SolverAnswer:
    try:
        schedule = schedule_tasks(
            call.problem, method=call.method, time_limit_s=call.time_limit_s, hint=call.hint, gap=call.gap
        )
    except AltoError as error:
        return SolverAnswer(error=type(error).__name__, message=str(error))
    return SolverAnswer(schedule=schedule)


if __name__ == "__main__":
    _serve()
