"""Makes schedules in a process of its own, so that a solver that crashes or hangs takes nothing with it.

``python -m alto.cluster.solver``: a pickled call of :func:`schedule_tasks` on stdin, its outcome on stdout.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from typing import Any

from alto.errors import AltoError, UnsupportedError
from alto.records import Schedule
from alto.scheduler import LIST_METHODS, SchedulingProblem, schedule_tasks

__all__ = ["GuardedSolver"]

FALLBACK = "lpt"


class GuardedSolver:
    """Schedules by ``method``; where that cannot be had, by list scheduling, with a notice in the schedule.

    Args:
        time_limit_s: What the solver may take.
        grace_s: What starting it, and anything else beyond that, may take before it counts as hung.
    """

    def __init__(self, method: str, *, time_limit_s: float, grace_s: float = 30.0) -> None:
        self._method = method.lower()
        self._time_limit_s = time_limit_s
        self._grace_s = grace_s

    def __call__(self, problem: SchedulingProblem, hint: Schedule | None = None) -> Schedule:
        """A schedule of the waiting tasks of ``problem``.

        Args:
            hint: The schedule so far.

        Raises:
            SpecError: The method is unknown.
        """
        if self._method in LIST_METHODS or not problem.pending:
            return schedule_tasks(problem, method=self._method if self._method in LIST_METHODS else FALLBACK)
        call = {"problem": problem, "method": self._method, "time_limit_s": self._time_limit_s, "hint": hint}
        try:
            done = subprocess.run(
                [sys.executable, "-m", "alto.cluster.solver"],
                input=pickle.dumps(call),
                capture_output=True,
                timeout=self._time_limit_s + self._grace_s,
                check=True,
            )
        except subprocess.TimeoutExpired:
            return self._fallback(problem, f"the solver did not answer within {self._time_limit_s:g} s and was killed")
        except subprocess.CalledProcessError as error:
            return self._fallback(problem, f"the solver's process ended with code {error.returncode}")
        outcome = pickle.loads(done.stdout)
        if isinstance(outcome, UnsupportedError):
            return self._fallback(problem, str(outcome))
        if isinstance(outcome, AltoError):
            raise outcome
        assert isinstance(outcome, Schedule)
        return outcome

    def _fallback(self, problem: SchedulingProblem, why: str) -> Schedule:
        return replace(schedule_tasks(problem, method=FALLBACK), notice=f"scheduled by {FALLBACK}: {why}")


def _answer(call: dict[str, Any]) -> Schedule | AltoError:
    try:
        return schedule_tasks(call.pop("problem"), **call)
    except AltoError as error:
        return error


if __name__ == "__main__":
    channel, sys.stdout = sys.stdout.buffer, sys.stderr  # whatever else is printed does not get into the answer
    channel.write(pickle.dumps(_answer(pickle.load(sys.stdin.buffer))))
