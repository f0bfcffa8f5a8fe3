"""Scheduling problems, drawn and random, and the optimum that exhaustive search finds for small ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence

from hypothesis import strategies as st

from alto.records import Gpu, Node, Placement
from alto.scheduler import RunningTask, SchedulingProblem, TaskDemand

Use = tuple[tuple[int, ...], int, int, str]
"""GPUs of each node, start, end, tenant."""


def nodes_of(*sizes: int) -> tuple[Node, ...]:
    return tuple(Node(name=f"n{index}", gpus=tuple(range(size))) for index, size in enumerate(sizes))


def tasks_of(*tasks: tuple[int, float]) -> tuple[TaskDemand, ...]:
    """Return tasks by their GPUs and seconds, named ``t0``, ``t1`` and so on."""
    return tuple(
        TaskDemand(task=f"t{index}", num_gpus=num_gpus, duration_s=duration_s)
        for index, (num_gpus, duration_s) in enumerate(tasks)
    )


def random_problem(seed: int, *, priorities: int = 1) -> SchedulingProblem:
    """Return one to three nodes and few enough tasks for :func:`least`; half of the problems have releases, running
    tasks and quotas."""
    draw = random.Random(seed)
    num_nodes = draw.randint(1, 3)
    nodes = nodes_of(*(draw.randint(1, 4) for _ in range(num_nodes)))
    total = sum(len(node.gpus) for node in nodes)
    has_releases, has_running, has_quotas = (draw.random() < 0.5 for _ in range(3))
    quota = draw.randint(max(1, total // 2), total) if has_quotas else total
    running = []
    for node in nodes if has_running else ():
        gpus = draw.sample(node.gpus, draw.randint(0, len(node.gpus)))
        if gpus:
            tenant, remaining_s = draw.choice(("a", "b")), draw.randint(1, 6)
            held = tuple(Gpu(node.name, index) for index in sorted(gpus))
            running.append(RunningTask(task=f"on {node.name}", gpus=held, remaining_s=remaining_s, tenant=tenant))
    pending = []
    for index in range(draw.randint(2, 7 - num_nodes)):
        tenant = draw.choice(("a", "b"))
        pending.append(
            TaskDemand(
                task=f"t{index}",
                num_gpus=draw.randint(1, quota if tenant == "a" else total),
                duration_s=draw.randint(1, 7),
                release_s=draw.randint(0, 8) if has_releases else 0,
                priority=draw.randrange(priorities),
                tenant=tenant,
            )
        )
    return SchedulingProblem(
        nodes=nodes, pending=tuple(pending), running=tuple(running), quotas={"a": quota} if has_quotas else {}
    )


def least(problem: SchedulingProblem, placed: Iterable[Placement] = ()) -> tuple[float, float]:
    """Return the least makespan and, with that, the least sum of ends of the waiting tasks, found by exhaustive search.

    It tries every order of the tasks, on every choice of nodes, each as early as possible; one of these is optimal.
    Times must be whole numbers.

    Args:
        placed: Tasks that are already placed; they stay there, and the makespan includes them.
    """
    tenants = {demand.task: demand.tenant for demand in problem.pending}
    uses = [(_counts(problem, item.gpus), int(item.start_s), int(item.end_s), tenants[item.task]) for item in placed]
    names = {item.task for item in placed}
    floor = max((end for _, _, end, _ in uses), default=0)
    uses += [(_counts(problem, task.gpus), 0, int(task.remaining_s), task.tenant) for task in problem.running]
    left = frozenset(demand for demand in problem.pending if demand.task not in names)
    seen: set[frozenset[object]] = set()
    best = [(float("inf"), float("inf"))]

    def extend(
        left: frozenset[TaskDemand], placed: frozenset[object], uses: list[Use], end: float, ends: float
    ) -> None:
        if placed in seen or end > best[0][0]:
            return
        seen.add(placed)
        if not left:
            best[0] = min(best[0], (end, ends))
        for demand in left:
            for counts in _choices(problem, demand.num_gpus):
                start = int(demand.release_s)
                while not _fits(problem, demand, counts, start, uses):
                    start += 1
                stop = start + int(demand.duration_s)
                use = (counts, start, stop, demand.tenant)
                extend(left - {demand}, placed | {(demand.task, use)}, [*uses, use], max(end, stop), ends + stop)

    extend(left, frozenset(), uses, floor, 0.0)
    return best[0]


def _counts(problem: SchedulingProblem, gpus: Sequence[Gpu]) -> tuple[int, ...]:
    return tuple(sum(gpu.node == node.name for gpu in gpus) for node in problem.nodes)


def _choices(problem: SchedulingProblem, num_gpus: int) -> Iterator[tuple[int, ...]]:
    """Return numbers of GPUs on each node, on as few nodes as possible."""
    splits = itertools.product(*(range(len(node.gpus) + 1) for node in problem.nodes))
    whole = [split for split in splits if sum(split) == num_gpus]
    fewest = min(sum(map(bool, split)) for split in whole)
    yield from (split for split in whole if sum(map(bool, split)) == fewest)


def _fits(
    problem: SchedulingProblem, demand: TaskDemand, counts: tuple[int, ...], start: int, uses: Sequence[Use]
) -> bool:
    quota = problem.quotas.get(demand.tenant)
    for at in range(start, start + int(demand.duration_s)):
        active = [use for use in uses if use[1] <= at < use[2]]
        for index, node in enumerate(problem.nodes):
            if counts[index] and counts[index] + sum(use[0][index] for use in active) > len(node.gpus):
                return False
        held = sum(sum(use[0]) for use in active if use[3] == demand.tenant)
        if quota is not None and held + demand.num_gpus > quota:
            return False
    return True


@st.composite
def problems(draw: st.DrawFn, *, max_tasks: int = 30, priorities: int = 2) -> SchedulingProblem:
    """Draw any problem: nodes of several sizes, perhaps one with a lost GPU; tasks that run, wait or come later;
    quotas."""
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    nodes = nodes_of(*sizes)
    if len(nodes[0].gpus) > 1 and draw(st.booleans()):
        nodes = (Node(name="n0", gpus=nodes[0].gpus[1:]), *nodes[1:])
    total = sum(len(node.gpus) for node in nodes)
    times = st.one_of(st.integers(1, 50).map(float), st.floats(0.01, 1e5))
    tenants = st.sampled_from(("a", "b"))
    quotas = draw(st.dictionaries(tenants, st.integers(1, total)))
    running = []
    for node in nodes:
        held = draw(st.integers(0, len(node.gpus)))
        if held:
            gpus = tuple(Gpu(node.name, index) for index in node.gpus[:held])
            tenant, remaining_s = draw(tenants), draw(st.one_of(st.just(0.0), times))
            running.append(RunningTask(task=f"on {node.name}", gpus=gpus, remaining_s=remaining_s, tenant=tenant))
    pending = []
    for index in range(draw(st.integers(0, max_tasks))):
        tenant = draw(tenants)
        pending.append(
            TaskDemand(
                task=f"t{index}",
                num_gpus=draw(st.integers(1, min(total, quotas.get(tenant, total)))),
                duration_s=draw(times),
                release_s=draw(st.one_of(st.just(0.0), times)),
                priority=draw(st.integers(0, priorities - 1)),
                tenant=tenant,
            )
        )
    return SchedulingProblem(nodes=nodes, pending=tuple(pending), running=tuple(running), quotas=quotas)


def paper_case() -> SchedulingProblem:
    """Return the paper's mix: 11 tasks on one node of 8 GPUs, two of 4 GPUs, three of 2 and six of 1, the wide ones
    longest.

    Durations, in seconds, are invented: hours for large models on many GPUs, less for small ones.
    """
    return SchedulingProblem(
        nodes=nodes_of(8),
        pending=tasks_of(
            *((4, 5400), (4, 4320), (2, 7200), (2, 3960), (2, 2520)),
            *((1, 9000), (1, 2880), (1, 2160), (1, 1620), (1, 1260), (1, 900)),
        ),
    )
