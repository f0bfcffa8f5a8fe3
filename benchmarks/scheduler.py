"""Measures the inter-task scheduler on the paper's case and on clusters: its distance from the optimum, and its time.

Workloads are drawn: lognormal durations, and tasks of 1, 2, 4 or 8 GPUs, on nodes of 8. A gap is relative to a bound
that is proven for the drawn tasks, and the worst gap of several draws is published. Finally queues are simulated with a
virtual clock: one of many tasks, and the paper's ablation on three clusters.

    python -m benchmarks.paper scheduler --scale cpu
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from alto.errors import ScheduleError
from alto.records import Node, Schedule
from alto.scheduler import RunningTask, SchedulingProblem, TaskDemand, check_schedule, schedule_tasks
from alto.scheduler.simulate import simulate
from alto.spec import Simulation
from benchmarks.common import option_parser, publish_figures
from benchmarks.makespan import MODES

GOALS = {
    "paper_case_s": ("<", 1.0),
    "gap_100_32": ("<=", 0.01),
    "gap_1000_512": ("<=", 0.04),
    "replan_1000_s": ("<=", 1.0),
    "simulate_10000_s": ("<=", 60.0),
}
METHODS = ("cp-sat", "lpt", "sjf", "fifo")
GPUS_PER_NODE = 8
NUM_GPUS, SHARES = (1, 2, 4, 8), (50, 25, 15, 10)
"""Number of GPUs of a task, and how many of 100 tasks ask for this number."""

SIGMA, HEAVY_SIGMA = 0.5, 1.0
"""Deviation of the logarithm of a duration. If it is larger, the longest task alone determines the makespan of every
method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Tasks drawn for a cluster; ``figure`` names the figure of its gap."""

    figure: str
    num_tasks: int
    num_nodes: int
    time_limit_s: float
    sigma: float = SIGMA


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The work of one scale.

    Attributes:
        replan_tasks, replan_nodes: Waiting tasks at the time of a replan, and the cluster.
        simulated_tasks, simulated_nodes: Tasks of the simulated queue, and its cluster.
        ablation_nodes: Clusters of the ablation.
    """

    workloads: tuple[Workload, ...]
    seeds: tuple[int, ...]
    replan_tasks: int
    replan_nodes: int
    simulated_tasks: int
    simulated_nodes: int
    ablation_nodes: tuple[int, ...]


SIZES = {
    "smoke": Size(
        workloads=(Workload(figure="gap_20_16", num_tasks=20, num_nodes=2, time_limit_s=1.0),),
        seeds=(0,),
        replan_tasks=40,
        replan_nodes=4,
        simulated_tasks=40,
        simulated_nodes=16,
        ablation_nodes=(1,),
    ),
    "cpu": Size(
        workloads=(
            Workload(figure="gap_100_32", num_tasks=100, num_nodes=4, time_limit_s=10.0),
            Workload(figure="gap_1000_512", num_tasks=1000, num_nodes=64, time_limit_s=10.0),
            Workload(figure="gap_100_32_heavy", num_tasks=100, num_nodes=4, time_limit_s=10.0, sigma=HEAVY_SIGMA),
            Workload(figure="gap_1000_512_heavy", num_tasks=1000, num_nodes=64, time_limit_s=10.0, sigma=HEAVY_SIGMA),
        ),
        seeds=(0, 1, 2),
        replan_tasks=1000,
        replan_nodes=64,
        simulated_tasks=10_000,
        simulated_nodes=128,
        ablation_nodes=(1, 8, 64),
    ),
}
REPLAN_LIMIT_S = 1.0
"""Time limit of a replan, as in a live queue."""

TASKS_PER_NODE = 25
"""Number of tasks per node in the ablation; all are present from the beginning."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = option_parser(__doc__, SIZES).parse_args(arguments)
    size = SIZES[options.scale]
    schedule_tasks(paper_case(), method="cp-sat", time_limit_s=1.0)  # loads the solver
    rows = [*measure("paper", paper_case(), 0, 10.0)]
    for workload in size.workloads:
        for seed in size.seeds:
            problem = drawn(workload.num_tasks, workload.num_nodes, seed, sigma=workload.sigma)
            rows += measure(workload.figure, problem, seed, workload.time_limit_s)
    for seed in size.seeds:
        problem, hint = replan_case(size.replan_tasks, size.replan_nodes, seed)
        rows += measure("replan", problem, seed, REPLAN_LIMIT_S, hint)
    rows.append(simulated(size.simulated_tasks, size.simulated_nodes))
    for num_nodes in size.ablation_nodes:
        for seed in size.seeds:
            rows += ablation(num_nodes, seed)
    return publish_figures(
        options,
        "scheduler",
        gate_failures=gate(rows),
        figures=lambda: figures(rows, size),
        goals=GOALS,
        rows=rows,
        notes=[
            "The solver is loaded before anything is measured, which takes about a second in a new process.",
            f"Of 100 drawn tasks {', '.join(map(str, SHARES))} ask for {', '.join(map(str, NUM_GPUS))} GPUs, whatever "
            f"their durations; these are lognormal with a median of an hour and sigma {SIGMA}, or {HEAVY_SIGMA} where "
            "the figure is called heavy.",
            ratios(rows),
            "Replan: the tasks that had started run on, one of them ended early, and the schedule before is the hint.",
            "Simulated: Poisson arrivals faster than the cluster can work, median an hour, 99th percentile ten hours, "
            "early exit by the measured shares, executors that crash; where more than 100 "
            "tasks wait or run, lpt plans for cp-sat.",
            f"Ablation: {TASKS_PER_NODE} tasks a node, all there from the beginning; no crashes. The "
            "figure is the makespan of batching alone (first come, first served) over that of the full system, the "
            "median of several draws.",
        ],
    )


def paper_case() -> SchedulingProblem:
    """Return the paper's mix: 11 tasks on one node of 8 GPUs, two of 4 GPUs, three of 2 and six of 1, the wide ones
    longest.

    Durations, in seconds, are invented: hours for large models on many GPUs, less for small ones.
    """
    tasks = [(4, 5400), (4, 4320), (2, 7200), (2, 3960), (2, 2520)]
    tasks += [(1, 9000), (1, 2880), (1, 2160), (1, 1620), (1, 1260), (1, 900)]
    return SchedulingProblem(
        nodes=cluster(1),
        pending=tuple(
            TaskDemand(task=f"t{index}", num_gpus=num_gpus, duration_s=duration_s)
            for index, (num_gpus, duration_s) in enumerate(tasks)
        ),
    )


def cluster(num_nodes: int) -> tuple[Node, ...]:
    return tuple(Node(name=f"n{index}", gpus=tuple(range(GPUS_PER_NODE))) for index in range(num_nodes))


def drawn(num_tasks: int, num_nodes: int, seed: int, *, sigma: float = SIGMA) -> SchedulingProblem:
    """Return tasks of about an hour, in whole tenths of a second."""
    draw = random.Random(seed)
    return SchedulingProblem(
        nodes=cluster(num_nodes),
        pending=tuple(
            TaskDemand(
                task=f"t{index}",
                num_gpus=draw.choices(NUM_GPUS, SHARES)[0],
                duration_s=round(3600 * draw.lognormvariate(0, sigma), 1),
            )
            for index in range(num_tasks)
        ),
    )


def replan_case(num_waiting: int, num_nodes: int, seed: int) -> tuple[SchedulingProblem, Schedule]:
    """Return a busy cluster with a number of waiting tasks, at the moment when a task has ended early; and its schedule
    until then."""
    problem = drawn(num_waiting + 3 * num_nodes, num_nodes, seed)
    schedule = schedule_tasks(problem, method="lpt")
    started, waiting = schedule.placements[:-num_waiting], {item.task for item in schedule.placements[-num_waiting:]}
    now_s = started[-1].start_s
    running = [
        RunningTask(task=item.task, gpus=item.gpus, remaining_s=item.end_s - now_s)
        for item in started
        if item.end_s > now_s
    ]
    case = replace(
        problem,
        pending=tuple(demand for demand in problem.pending if demand.task in waiting),
        running=tuple(running[1:]),
    )
    return case, schedule


def measure(
    name: str, problem: SchedulingProblem, seed: int, time_limit_s: float, hint: Schedule | None = None
) -> list[dict[str, Any]]:
    """Return a row for every method."""
    rows = []
    for method in METHODS:
        start = time.perf_counter()
        schedule = schedule_tasks(problem, method=method, time_limit_s=time_limit_s, hint=hint)
        duration_s = time.perf_counter() - start
        rows.append(
            {
                "case": name,
                "seed": seed,
                "method": method,
                "status": schedule.status,
                "makespan_s": schedule.makespan_s,
                "completions_s": sum(placement.end_s for placement in schedule.placements),
                "bound_s": schedule.bound_s,
                "solved_in_s": duration_s,
                "invalid": invalid(problem, schedule),
            }
        )
        print(f"{name} {seed} {method}: gap {schedule.gap:.2%}, {schedule.status}, {duration_s:.2f} s", flush=True)
    return rows


def simulated(num_tasks: int, num_nodes: int) -> dict[str, Any]:
    """Return a row for a queue of a number of tasks, from the first to the last, with the default method of a queue."""
    simulation = Simulation(
        nodes=num_nodes,
        gpus_per_node=GPUS_PER_NODE,
        num_tasks=num_tasks,
        arrivals="poisson",
        arrivals_per_hour=num_tasks / 2,
        gpus=dict(zip(NUM_GPUS, SHARES, strict=True)),
        crashes_per_hour=0.01,
        seed=0,
    )
    start = time.perf_counter()
    outcome = simulate(simulation, method=METHODS[0], early_exit=True)
    duration_s = time.perf_counter() - start
    print(f"simulated: {outcome.num_replans} plans by {outcome.planner}, {duration_s:.2f} s", flush=True)
    missing = num_tasks - outcome.num_finished - outcome.num_failed
    return {
        "case": "simulated",
        "seed": 0,
        "method": METHODS[0],
        "planner": outcome.planner,
        "num_replans": outcome.num_replans,
        "num_finished": outcome.num_finished,
        "num_failed": outcome.num_failed,
        "makespan_s": outcome.makespan_s,
        "utilisation": outcome.utilisation,
        "solved_in_s": duration_s,
        "invalid": f"{missing} tasks were lost" if missing else "",
    }


def ablation(num_nodes: int, seed: int) -> list[dict[str, Any]]:
    """Return a row for every mode of the paper's ablation, simulated."""
    simulation = Simulation(
        nodes=num_nodes,
        gpus_per_node=GPUS_PER_NODE,
        num_tasks=TASKS_PER_NODE * num_nodes,
        gpus=dict(zip(NUM_GPUS, SHARES, strict=True)),
        seed=seed,
    )
    rows = []
    for mode, (method, early_exit) in MODES.items():
        outcome = simulate(simulation, method=method, early_exit=early_exit)
        lost = simulation.num_tasks - outcome.num_finished
        rows.append(
            {
                "case": _ablation_case(num_nodes),
                "seed": seed,
                "method": method,
                "mode": mode,
                "planner": outcome.planner,
                "makespan_s": outcome.makespan_s,
                "utilisation": outcome.utilisation,
                "invalid": f"{lost} tasks did not finish" if lost else "",
            }
        )
        print(f"{rows[-1]['case']} {seed} {mode}: {outcome.makespan_s / 3600:.1f} h", flush=True)
    return rows


def _ablation_case(num_nodes: int) -> str:
    return f"ablation_{num_nodes * GPUS_PER_NODE}_gpus"


def invalid(problem: SchedulingProblem, schedule: Schedule) -> str:
    """Return the validator's complaints about a schedule; empty if it is valid."""
    try:
        check_schedule(problem, schedule)
    except ScheduleError as error:
        return str(error)
    return ""


def gate(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the faults: a schedule that is not valid, or a schedule of CP-SAT that ends later than that of ``lpt``."""
    failures = [f"{row['case']} {row['seed']} {row['method']}: {row['invalid']}" for row in rows if row["invalid"]]
    lpt = {(row["case"], row["seed"]): row["makespan_s"] for row in rows if row["method"] == "lpt"}
    for row in rows:
        limit_s = lpt.get((row["case"], row["seed"]), float("inf"))
        if row["method"] == "cp-sat" and row["makespan_s"] > limit_s * (1 + 1e-9):
            failures.append(f"{row['case']} {row['seed']}: cp-sat ends after lpt")
    return failures


def figures(rows: Sequence[Mapping[str, Any]], size: Size) -> dict[str, float]:
    """Return figures: the worst of several draws; gaps of all methods are relative to the highest bound."""

    def of(case: str, method: str) -> list[Mapping[str, Any]]:
        return [row for row in rows if (row["case"], row["method"]) == (case, method)]

    def worst_gap(case: str, method: str) -> float:
        pairs = zip(of(case, method), of(case, "cp-sat"), strict=True)
        return max(row["makespan_s"] / best["bound_s"] - 1 for row, best in pairs)

    (paper,) = of("paper", "cp-sat")
    found = {"paper_case_s": paper["solved_in_s"]}
    for method in ("sjf", "lpt"):
        (listed,) = of("paper", method)
        found[f"paper_case_{method}_over_cp_sat"] = listed["makespan_s"] / paper["makespan_s"]
    for workload in size.workloads:
        found[workload.figure] = worst_gap(workload.figure, "cp-sat")
        found[f"lpt_{workload.figure}"] = worst_gap(workload.figure, "lpt")
    found[f"replan_{size.replan_tasks}_s"] = max(row["solved_in_s"] for row in of("replan", "cp-sat"))
    found["replan_gap"] = worst_gap("replan", "cp-sat")
    found["lpt_replan_gap"] = worst_gap("replan", "lpt")
    (queue,) = of("simulated", "cp-sat")
    found[f"simulate_{size.simulated_tasks}_s"] = queue["solved_in_s"]
    for case in map(_ablation_case, size.ablation_nodes):
        makespans_s = {
            mode: [row["makespan_s"] for row in rows if row["case"] == case and row["mode"] == mode] for mode in MODES
        }
        gains = [alone / full for alone, full in zip(makespans_s["B"], makespans_s["B+S+EE"], strict=True)]
        found[case] = statistics.median(gains)
    return found


def ratios(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the makespans of the other methods for the paper's case, divided by that of CP-SAT."""
    makespans_s = {row["method"]: row["makespan_s"] for row in rows if row["case"] == "paper"}
    others = [f"{method} {makespans_s[method] / makespans_s['cp-sat']:.3f}" for method in METHODS[1:]]
    return f"Paper's case, makespan over that of cp-sat: {', '.join(others)}."
