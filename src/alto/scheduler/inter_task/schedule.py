"""The one entry point to all schedulers."""

from __future__ import annotations

from alto.errors import SpecError
from alto.records import Schedule
from alto.scheduler.inter_task.bounds import makespan_bound
from alto.scheduler.inter_task.cp_sat import cp_sat_schedule
from alto.scheduler.inter_task.lists import LIST_METHODS, list_reservations, place
from alto.scheduler.inter_task.milp import milp_schedule
from alto.scheduler.inter_task.problem import SchedulingProblem, schedule_from
from alto.scheduler.inter_task.sharing import apart, colocated

METHODS = ("cp-sat", "milp", *LIST_METHODS)


def schedule_tasks(
    problem: SchedulingProblem,
    *,
    method: str,
    time_limit_s: float = 10.0,
    hint: Schedule | None = None,
    gap: float = 0.0,
) -> Schedule:
    """Make a schedule of the waiting tasks of ``problem``.

    First it is decided which tasks share an executor (:func:`colocated`); then the method places executors. ``fifo``
    never shares: it is the baseline that only batches jobs, first come, first served.

    Args:
        method: One of :data:`METHODS`, in any case.
        time_limit_s: Time limit of a solver; if it has not proven its schedule by then, it returns its best one.
            Loading OR-tools, about a second in a new process, comes on top.
        hint: An earlier schedule of some of the tasks; ``cp-sat`` starts from its order and nodes.
        gap: Relative distance from the bound at which ``cp-sat`` stops searching.

    Raises:
        SpecError: The method is unknown.
        UnsupportedError: The method needs OR-tools, which is not installed.
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
    """Make a schedule of tasks that do not share."""
    if name == "cp-sat":
        return cp_sat_schedule(problem, time_limit_s=time_limit_s, hint=hint, gap=gap)
    if name == "milp":
        return milp_schedule(problem, time_limit_s=time_limit_s)
    placements = place(problem, list_reservations(problem, name), keeps_starts=True)
    return schedule_from(name, placements, bound_s=makespan_bound(problem), status="heuristic")
