"""The one entry point to all schedulers."""

from __future__ import annotations

from alto.errors import SpecError
from alto.records import Schedule
from alto.scheduler.inter_task.bounds import makespan_bound
from alto.scheduler.inter_task.cp_sat import cp_sat_schedule
from alto.scheduler.inter_task.lists import LIST_METHODS, list_reservations
from alto.scheduler.inter_task.milp import milp_schedule
from alto.scheduler.inter_task.outcome import schedule_from
from alto.scheduler.inter_task.problem import SchedulingProblem
from alto.scheduler.inter_task.reservations import place
from alto.scheduler.inter_task.sharing_search import apart, colocated

__all__ = ["METHODS", "schedule_tasks"]

METHODS = ("cp-sat", "milp", *LIST_METHODS)


def schedule_tasks(
    problem: SchedulingProblem,
    *,
    method: str,
    time_limit_s: float = 10.0,
    hint: Schedule | None = None,
    gap: float = 0.0,
) -> Schedule:
    """A schedule of the tasks of ``problem`` that wait.

    Which of them share an executor is decided first (:func:`colocated`); every method then places executors. ``fifo``
    never shares: it is the baseline of batching alone, first come first served.

    Args:
        method: One of :data:`METHODS`, in any case.
        time_limit_s: A solver that has not proven its schedule by then gives the best it has. Loading OR-tools, about
            a second in a new process, comes before.
        hint: An earlier schedule of some of the tasks, from whose order and nodes ``cp-sat`` starts.
        gap: Share of the bound by which a schedule may be longer that ``cp-sat`` looks no further for a better one.

    Raises:
        SpecError: The method is unknown.
        UnsupportedError: The method needs OR-tools, which are not installed.
    """
    name = method.lower()
    if name not in METHODS:
        raise SpecError(f"method: expected one of {', '.join(METHODS)}, found {method!r}")
    colocation = apart(problem) if name == "fifo" else colocated(problem)
    found = _schedule(colocation.problem, name, time_limit_s=time_limit_s, hint=colocation.hint(hint), gap=gap)
    return colocation.expanded(found)


def _schedule(
    problem: SchedulingProblem, name: str, *, time_limit_s: float, hint: Schedule | None, gap: float
) -> Schedule:
    """A schedule of tasks that do not share."""
    if name == "cp-sat":
        return cp_sat_schedule(problem, time_limit_s=time_limit_s, hint=hint, gap=gap)
    if name == "milp":
        return milp_schedule(problem, time_limit_s=time_limit_s)
    placements = place(problem, list_reservations(problem, name), keeps_starts=True)
    return schedule_from(name, placements, bound_s=makespan_bound(problem), status="heuristic")
