"""Shows a plan in the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from alto.export.wording import clean, format_duration, format_share
from alto.records import MemoryProfile, Schedule, TaskPlan

__all__ = ["plan_text", "schedule_text"]

_MIB = 2**20


def plan_text(plan: TaskPlan, *, price_per_hour: float | None = None) -> RenderableType:
    """Describe jobs, memory of several packings, the chosen packing, time and cost."""
    memory = plan.memory
    planned = memory.margin * memory.capacity_bytes
    smallest, largest = plan.num_parameters
    mean, longest = plan.row_tokens
    took = format_duration(plan.profile_s)
    measured = (
        f"measured earlier in {took} (--refresh measures again)"
        if plan.is_cached
        else f"measured now in {took}, and saved"
    )
    head = [
        ("jobs", f"{plan.num_jobs:,}, with {_span(smallest, largest)} trainable parameters each"),
        ("rows", f"{mean:,.0f} tokens on average, {longest:,} in the longest"),
        (
            "memory",
            f"{_size(memory.fixed_bytes)} + {memory.bytes_per_token / 1024:,.1f} KiB per token of a micro-batch "
            f"+ {_size(plan.slot_bytes)} per slot, of {_size(planned)} "
            f"({format_share(memory.margin)} of {_size(memory.capacity_bytes)})",
        ),
        (
            "",
            f"{measured}: {len(memory.points)} steps, {_memory_error(memory)}",
        ),
    ]
    chosen = (
        f"max_slots {plan.max_slots}, max_tokens_per_step {plan.max_tokens_per_step:,}, "
        f"max_tokens_per_pass {plan.max_tokens_per_pass:,}"
        + (", gradient_checkpointing" if plan.gradient_checkpointing else "")
        + f"; at most {_size(plan.peak_bytes)}"
    )
    most, expected = (None, None) if price_per_hour is None else plan.cost(price_per_hour)
    longest_time = f"{_priced(plan.duration_s, most)} with early exit off"
    if plan.is_at_budget:
        longest_time = f"{_priced(plan.duration_s, most, 'at most')} (search.budget)"
    time = [("time", longest_time)]
    if plan.expected_duration_s < plan.duration_s:
        time.append(("", f"{_priced(plan.expected_duration_s, expected)} expected with early exit"))
    disk = []
    if plan.disk_free_bytes is not None:
        free = _size(plan.disk_free_bytes)
        disk.append(("disk", f"at most {_size(plan.disk_bytes)} during training, of {free} free"))
    if not plan.is_cached:
        total = format_duration(plan.profile_s + plan.expected_duration_s)
        time.append(("", f"{total} including the measurement, which a run of the same task does not repeat"))
    notes = [("note", clean(note)) for note in plan.notes]
    why = [("", f"one slot: {plan.why_one_slot}")] if plan.why_one_slot else []
    title = Text(f"{plan.task} on {plan.model}, {plan.device}")
    tail = [("packing", chosen), *why, *time, *disk, *notes]
    return Group(title, _labelled(head), _table(plan), _labelled(tail), Text(""))


def _labelled(lines: Sequence[tuple[str, str]]) -> Table:
    """Return a table with a label and a text per line; a long text continues below its own start."""
    table = Table.grid()
    table.add_column(width=12, no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in lines:
        table.add_row(Text(f"{label}:" if label else ""), Text(text))
    return table


def schedule_text(schedule: Schedule) -> RenderableType:
    """Describe which task runs where and when, which tasks share an executor, and the quality of the schedule."""
    num_tasks = Counter(placement.executor for placement in schedule.placements if placement.executor)
    shared = [executor for executor, number in num_tasks.items() if number > 1]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for heading in ("task", "GPUs"):
        table.add_column(heading, overflow="fold")
    for heading in ("start", "end"):
        table.add_column(heading, justify="right")
    if shared:
        table.add_column("trained in one process with", overflow="fold")
    for placement in schedule.placements:
        gpus = ", ".join(f"{gpu.node}:{gpu.index}" for gpu in placement.gpus)
        others = [
            clean(other.task)
            for other in schedule.placements
            if placement.executor in shared and other.executor == placement.executor and other is not placement
        ]
        table.add_row(
            Text(clean(placement.task)),
            Text(clean(gpus)),
            format_duration(placement.start_s),
            format_duration(placement.end_s),
            *([Text(", ".join(others))] if shared else []),
        )
    together = " that groups the tasks in the same way" if shared else ""
    quality = {
        "optimal": f"by these estimates no schedule{together} is shorter",
        "feasible": f"by these estimates no schedule is shorter than {format_duration(schedule.bound_s)}",
        "heuristic": f"by these estimates no schedule is shorter than {format_duration(schedule.bound_s)}",
    }[schedule.status]
    lines = [("together", f"about {format_duration(schedule.makespan_s)} by {schedule.method}; {quality}")]
    if schedule.notice:
        lines.append(("note", clean(schedule.notice)))
    return Group(table, _labelled(lines), Text(""))


def _table(plan: TaskPlan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for heading in ("slots", "tokens per micro-batch", "peak", "tokens/s", ""):
        table.add_column(heading, justify="right")
    num_resident = min(plan.max_slots, plan.num_jobs)
    for packing in plan.packings:
        is_chosen = (packing.num_slots, packing.num_tokens) == (num_resident, plan.max_tokens_per_pass)
        table.add_row(
            f"{packing.num_slots}",
            f"{packing.num_tokens:,}",
            _size(packing.peak_bytes),
            f"{packing.tokens_per_s:,.0f}",
            "chosen" if is_chosen else "" if packing.fits else "does not fit",
        )
    return table


def _priced(duration_s: float, cost: float | None, bound: str = "about") -> str:
    return f"{bound} {format_duration(duration_s)}" + ("" if cost is None else f", which costs {cost:,.2f}")


def _span(smallest: int, largest: int) -> str:
    return f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / _MIB:,.1f} MiB"


def _memory_error(memory: MemoryProfile) -> str:
    """Describe how well the memory model fits the measured steps; two points say nothing, as any line fits them."""
    if len({point.num_tokens for point in memory.points}) == 2:
        return "too few to know the memory estimate error"
    return f"memory estimate error {format_share(memory.error_median)} (at worst {format_share(memory.error_worst)})"
