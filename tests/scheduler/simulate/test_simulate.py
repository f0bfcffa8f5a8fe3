"""The simulator: deterministic, nothing lost, and limited plans start the same tasks as whole plans."""

from __future__ import annotations

import itertools

import pytest

from alto.errors import SpecError
from alto.scheduler import schedule_tasks
from alto.scheduler.simulate import run, simulate, smallest_cluster
from alto.scheduler.simulate.workload import draw_tasks
from alto.spec import ArrivingTask, Simulation


def hard(**more: object) -> Simulation:
    """Return tasks on a cluster with many failures."""
    values: dict[str, object] = {
        "nodes": 2,
        "gpus_per_node": 4,
        "num_tasks": 40,
        "arrivals": "poisson",
        "arrivals_per_hour": 20.0,
        "estimate_error": 3.0,
        "gpu_mtbf_hours": 40.0,
        "crashes_per_hour": 0.1,
        "max_attempts": 20,
    }
    return Simulation(**(values | more))


def test_the_same_seed_gives_the_same_and_another_another():
    outcome = simulate(hard(), method="lpt", early_exit=False)
    assert outcome == simulate(hard(), method="lpt", early_exit=False)
    assert outcome != simulate(hard(seed=1), method="lpt", early_exit=False)


@pytest.mark.parametrize("method", ["fifo", "sjf", "lpt"])
def test_nothing_is_lost_and_no_gpu_has_two_tasks(method: str):
    outcome = simulate(hard(), method=method, early_exit=False)
    assert outcome.num_finished == 40
    assert outcome.num_attempts > 40
    by_gpu: dict[object, list[tuple[float, float]]] = {}
    for attempt in outcome.actual:
        for gpu in attempt.gpus:
            by_gpu.setdefault(gpu, []).append((attempt.start_s, attempt.end_s))
    for spans in by_gpu.values():
        spans.sort()
        assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize(
    ("method", "more"),
    # Without overtaking, a start depends on when the task before was expected to start.
    [("fifo", {"estimate_error": 1.0, "early_exit_shares": [0.2]}), ("sjf", {}), ("lpt", {})],
)
def test_limited_plans_start_the_same_tasks_as_whole_plans(
    monkeypatch: pytest.MonkeyPatch, method: str, more: dict[str, object], nodes: int
):
    simulation = hard(arrivals="at_once", arrivals_per_hour=None, nodes=nodes, gpus={1: 0.5, 4: 0.3, 6: 0.2}, **more)
    whole = simulate(simulation, method=method, early_exit=True)
    monkeypatch.setattr(run, "MAX_LISTED", 0)
    of_now = simulate(simulation, method=method, early_exit=True)
    assert of_now.actual == whole.actual
    assert of_now.makespan_s == whole.makespan_s


def test_three_tasks_by_hand():
    trace = tuple(ArrivingTask(arrival_s=0.0, duration_s=seconds) for seconds in (10.0, 10.0, 20.0))
    simulation = Simulation(gpus_per_node=2, trace=trace, early_exit_shares=[0.5])
    fifo, lpt = (simulate(simulation, method=method, early_exit=False) for method in ("fifo", "lpt"))
    assert (fifo.makespan_s, lpt.makespan_s) == (30, 20)
    assert lpt.utilisation == 1
    assert (lpt.mean_completion_s, lpt.p99_completion_s) == (pytest.approx(50 / 3), 20)
    assert simulate(simulation, method="lpt", early_exit=True).makespan_s == 10


def test_the_smallest_cluster_is_enough_and_one_node_less_is_not():
    trace = tuple(ArrivingTask(arrival_s=0.0, duration_s=10.0) for _ in range(9))
    simulation = Simulation(gpus_per_node=1, trace=trace)
    found = smallest_cluster(simulation, within_s=30.0, method="fifo", early_exit=False)
    assert (found.nodes, found.num_gpus, found.makespan_s) == (3, 3, 30)
    with pytest.raises(SpecError, match="allow more time"):
        smallest_cluster(simulation, within_s=9.0, method="fifo", early_exit=False)


def test_an_unknown_method_and_a_task_too_large_are_refused():
    with pytest.raises(SpecError, match="expected one of"):
        simulate(hard(), method="magic", early_exit=False)
    with pytest.raises(SpecError, match="expected num_gpus from 1 to 8"):
        simulate(hard(gpus={9: 1.0}), method="fifo", early_exit=False)


def test_a_task_of_priority_goes_first_though_others_waited_longer():
    urgent = ArrivingTask(arrival_s=1.0, duration_s=10.0, priority=1)
    trace = (*(ArrivingTask(arrival_s=0.0, duration_s=10.0) for _ in range(3)), urgent)
    outcome = simulate(Simulation(gpus_per_node=1, trace=trace), method="fifo", early_exit=False)
    assert [attempt.task for attempt in outcome.actual] == ["task-0", "task-3", "task-1", "task-2"]


def test_pareto_durations_have_the_median_and_the_99th_percentile_that_were_asked_for():
    simulation = Simulation(
        num_tasks=20_000, duration_distribution="pareto", duration_median_s=100.0, duration_p99_s=1000.0
    )
    drawn = sorted(task.task.duration_s for task in draw_tasks(simulation))
    assert drawn[10_000] == pytest.approx(100.0, rel=0.03)
    assert drawn[19_800] == pytest.approx(1000.0, rel=0.15)


def test_gpus_that_were_lost_do_not_count_as_unused():
    trace = tuple(ArrivingTask(arrival_s=0.0, duration_s=1e5) for _ in range(8))
    simulation = Simulation(gpus_per_node=1, trace=trace, gpu_mtbf_hours=10.0, gpu_repair_hours=10.0, max_attempts=50)
    outcome = simulate(simulation, method="fifo", early_exit=False)
    assert outcome.num_attempts > 8
    assert outcome.utilisation == pytest.approx(1.0)


def test_the_plans_of_a_solver_share_its_time(monkeypatch: pytest.MonkeyPatch):
    limits_s: list[float] = []
    clock_s = 0.0

    def plan(problem: object, *, method: str, time_limit_s: float, **more: object) -> object:
        nonlocal clock_s
        limits_s.append(time_limit_s)
        clock_s += time_limit_s  # all that it may take
        return schedule_tasks(problem, method="lpt")

    monkeypatch.setattr(run, "schedule_tasks", plan)
    monkeypatch.setattr(run.time, "monotonic", lambda: clock_s)
    ended: list[tuple[int, int]] = []
    outcome = simulate(
        hard(solver_s=4.0), method="cp-sat", early_exit=True, on_progress=lambda *counts: ended.append(counts)
    )
    assert limits_s[0] == 4.0 / 40
    assert len(limits_s) == outcome.num_replans > 40
    assert sum(limits_s) < 4.0 + 0.02 * len(limits_s)
    assert ended[-1] == (40, 40)
    assert ended == sorted(ended)
