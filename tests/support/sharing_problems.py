"""Scheduling problems of tasks that may share executors."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from schedules import nodes_of

from alto.records import Gpu, Sharing
from alto.scheduler import RunningTask, SchedulingProblem, TaskDemand

__all__ = ["demand_of", "running_of", "sharing_of", "sharing_problems"]


def sharing_of(step_s: float, *, base: str = "b", num_slots: int = 1, capacity_bytes: int = 1000) -> Sharing:
    """Return the sharing properties of a task with slots of 1 byte besides 10 bytes."""
    return Sharing(
        base=base, step_s=step_s, num_slots=num_slots, slot_bytes=1, pass_bytes=10, capacity_bytes=capacity_bytes
    )


def demand_of(task: str, duration_s: float, step_s: float, **more: object) -> TaskDemand:
    """Return a task on one GPU that may share; ``more`` are fields of the demand, or of its sharing."""
    of_sharing = {name: more.pop(name) for name in ("base", "num_slots", "capacity_bytes") if name in more}
    demand = TaskDemand(task=task, num_gpus=1, duration_s=duration_s, sharing=sharing_of(step_s, **of_sharing))
    return replace(demand, **more)


def running_of(
    task: str, gpu: Gpu, remaining_s: float, step_s: float, executor: str = "e", **more: object
) -> RunningTask:
    """Return a running task that others may join; ``more`` as for :func:`demand_of`."""
    demand = demand_of(task, max(remaining_s, 1.0), step_s, **more)
    return RunningTask(
        task=task,
        gpus=(gpu,),
        remaining_s=remaining_s,
        tenant=demand.tenant,
        priority=demand.priority,
        executor=executor,
        sharing=demand.sharing,
    )


@st.composite
def sharing_problems(draw: st.DrawFn, *, max_tasks: int = 20) -> SchedulingProblem:
    """Draw any problem in which some tasks may share: with bases, memory, priorities, releases, quotas, running
    executors, and tasks on several GPUs."""
    nodes = nodes_of(*draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    gpus = [Gpu(node.name, index) for node in nodes for index in node.gpus]
    quotas = draw(st.dictionaries(st.sampled_from(("a", "b")), st.integers(1, len(gpus)), max_size=1))
    times = st.one_of(st.integers(1, 50).map(float), st.floats(0.01, 1e4))
    shares = st.sampled_from((0.0, 0.1, 0.5, 0.9, 1.0))
    tenants, bases = st.sampled_from(("a", "b", "c")), st.sampled_from(("x", "y"))

    def shared(task: str, duration_s: float, **more: object) -> TaskDemand:
        return demand_of(
            task,
            duration_s,
            duration_s * draw(shares),
            base=draw(bases),
            num_slots=draw(st.integers(1, 4)),
            capacity_bytes=draw(st.sampled_from((1000, 16))),
            tenant=draw(tenants),
            priority=draw(st.sampled_from((0, 0, 1))),
            **more,
        )

    running: list[RunningTask] = []
    for number, gpu in enumerate(gpus):
        first: RunningTask | None = None
        for index in range(draw(st.integers(0, 3))):
            remaining_s = draw(times)
            found = shared(f"r{number}-{index}", remaining_s)
            task = RunningTask(
                task=found.task,
                gpus=(gpu,),
                remaining_s=remaining_s,
                tenant=found.tenant,
                priority=found.priority,
                executor=f"e{number}",
                sharing=found.sharing if draw(st.integers(0, 4)) else None,
            )
            if first is not None:  # tasks that share are alike
                task = replace(task, tenant=first.tenant, priority=first.priority)
                if task.sharing is not None and first.sharing is not None:
                    task = replace(task, sharing=replace(task.sharing, base=first.sharing.base))
            first = first or task
            running.append(task)
    pending: list[TaskDemand] = []
    for index in range(draw(st.integers(0, max_tasks))):
        demand = shared(f"t{index}", draw(times), release_s=draw(st.sampled_from((0.0, 0.0, 0.0, 5.0))))
        if not draw(st.integers(0, 5)):
            most = min(len(gpus), quotas.get(demand.tenant, len(gpus)))
            demand = replace(demand, num_gpus=draw(st.integers(1, most)))
        pending.append(demand if draw(st.integers(0, 5)) else replace(demand, sharing=None))
    return SchedulingProblem(nodes=nodes, pending=tuple(pending), running=tuple(running), quotas=quotas)
