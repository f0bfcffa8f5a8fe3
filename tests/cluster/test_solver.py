"""The guarded solver: its answers, and its answers when the solver's process does not answer."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from sharing_problems import demand_of, running_of

from alto.cluster import GuardedSolver, solver
from alto.cluster.solver import CALLS, SolverAnswer, SolverCall, decoded, encoded
from alto.errors import SpecError
from alto.records import Gpu, Node, Schedule
from alto.scheduler import RunningTask, SchedulingProblem, TaskDemand, check_schedule
from alto.version import install_command

NODES = (Node(name="n", gpus=(0, 1)),)
PROBLEM = SchedulingProblem(
    nodes=NODES,
    pending=tuple(
        TaskDemand(task=name, num_gpus=gpus, duration_s=seconds)
        for name, gpus, seconds in (("a", 1, 3000.0), ("b", 1, 3000.0), ("c", 2, 4000.0), ("d", 1, 2000.0))
    ),
)

LIMIT_S = 600.0
"""A limit that none of these tests reaches."""


def _interpreter(folder: Path, does: str) -> str:
    """Write a stand-in for Python that does something else."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{does}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_the_answer_is_the_solvers() -> None:
    with GuardedSolver("cp-sat", time_limit_s=5.0) as solve:
        schedule = solve(PROBLEM)
        assert (schedule.method, schedule.status, schedule.notice) == ("cp-sat", "optimal", "")
        assert schedule.makespan_s == pytest.approx(9000.0)


def test_tasks_that_share_reach_the_solver_and_their_executor_comes_back() -> None:
    running = running_of("r", Gpu("n", 0), 10.0, 6.0)
    tasks = tuple(demand_of(f"t{number}", 10.0, 6.0) for number in range(4))
    problem = SchedulingProblem(nodes=NODES, pending=tasks, running=(running,))
    call = SolverCall(problem=problem, method="cp-sat", time_limit_s=5.0, hint=None, gap=0.0)
    assert decoded(CALLS, encoded(CALLS, call)) == call
    with GuardedSolver("cp-sat", time_limit_s=5.0) as solve:
        schedule = solve(problem)
        assert schedule.notice == ""
        check_schedule(problem, schedule)
        assert {placement.executor for placement in schedule.placements} >= {"e"}
        assert {placement.task: placement.executor for placement in solve(problem, schedule).placements} == {
            placement.task: placement.executor for placement in schedule.placements
        }


def test_one_process_answers_all_calls_and_is_replaced_when_it_was_killed() -> None:
    with GuardedSolver("cp-sat", time_limit_s=5.0) as solve:
        solve(PROBLEM)
        (first,) = _children()
        assert solve(PROBLEM).status == "optimal"
        assert _children() == {first}
        os.kill(first, signal.SIGKILL)
        assert "ended with code -9" in solve(PROBLEM).notice
        assert solve(PROBLEM).notice == ""
        (second,) = _children()
        assert second != first
    assert _children() == set()


def _children() -> set[int]:
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split()
    return {int(pid) for pid in listed if b"alto.cluster.solver" in Path(f"/proc/{pid}/cmdline").read_bytes()}


@pytest.mark.parametrize(("seconds", "limit_s"), [(1.0, 0.2), (100.0, 2.0), (1e6, 5.0)])
def test_a_schedule_of_short_tasks_is_not_looked_for_long(
    monkeypatch: pytest.MonkeyPatch, seconds: float, limit_s: float
) -> None:
    limits = []

    class Process:
        def ask(self, call: SolverCall, *, timeout_s: float) -> SolverAnswer:
            limits.append(call.time_limit_s)
            assert timeout_s == call.time_limit_s + 7.0
            return SolverAnswer(schedule=Schedule(method="cp-sat", placements=(), bound_s=0.0, status="optimal"))

        def kill(self) -> None: ...

    monkeypatch.setattr(solver, "_Process", Process)
    tasks = tuple(TaskDemand(task=name, num_gpus=2, duration_s=seconds) for name in "ab")
    with GuardedSolver("cp-sat", time_limit_s=5.0, grace_s=7.0) as solve:
        solve(SchedulingProblem(nodes=NODES, pending=tasks))
    assert limits == [pytest.approx(limit_s)]


def test_list_methods_need_no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(solver.sys, "executable", _interpreter(tmp_path, "exit 3"))
    assert GuardedSolver("sjf", time_limit_s=5.0)(PROBLEM).method == "sjf"


@pytest.mark.parametrize(
    ("does", "grace_s", "why"),
    [
        ("exit 3", LIMIT_S, "ended with code 3"),
        ("kill -9 $$", LIMIT_S, "ended with code -9"),
        ("exec sleep 3600", 0.1, "did not answer within 0.1 s and was killed"),
    ],
    ids=["crash", "kill", "hang"],
)
def test_without_an_answer_tasks_are_listed_with_a_notice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, does: str, grace_s: float, why: str
) -> None:
    monkeypatch.setattr(solver.sys, "executable", _interpreter(tmp_path, does))
    with GuardedSolver("cp-sat", time_limit_s=0.1, grace_s=grace_s) as solve:
        schedule = solve(PROBLEM)
    assert schedule.method == "lpt"
    assert {placement.task for placement in schedule.placements} == {"a", "b", "c", "d"}
    assert why in schedule.notice


def test_a_process_that_cannot_be_started_ends_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(solver.sys, "executable", str(tmp_path / "gone"))
    with GuardedSolver("cp-sat", time_limit_s=5.0) as solve:
        schedule = solve(PROBLEM)
    assert schedule.method == "lpt"
    assert "could not be started" in schedule.notice


def test_a_missing_package_is_reported_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    does = f"exec {sys.executable} -c \"import sys, runpy; sys.modules['ortools'] = None; {_RUN}\""
    monkeypatch.setattr(solver.sys, "executable", _interpreter(tmp_path, does))
    with GuardedSolver("cp-sat", time_limit_s=5.0) as solve:
        schedule = solve(PROBLEM)
    assert schedule.method == "lpt"
    assert install_command("scheduler") in schedule.notice


_RUN = "runpy.run_module('alto.cluster.solver', run_name='__main__', alter_sys=True)"


def test_a_mistake_of_the_user_stays_one() -> None:
    with GuardedSolver("magic", time_limit_s=5.0) as solve, pytest.raises(SpecError, match="expected one of"):
        solve(PROBLEM)


def test_running_tasks_alone_need_no_solver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(solver.sys, "executable", _interpreter(tmp_path, "exit 3"))
    running = RunningTask(task="r", gpus=(Gpu("n", 0),), remaining_s=5.0)
    schedule = GuardedSolver("cp-sat", time_limit_s=5.0)(SchedulingProblem(nodes=NODES, pending=(), running=(running,)))
    assert (schedule.placements, schedule.notice) == ((), "")
