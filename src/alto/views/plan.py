"""Shows a plan in the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from alto.records import DataPreview, MemoryProfile, PreviewExample, Schedule, Segments, TaskPlan
from alto.runs import RunState, RunSummary
from alto.views.wording import (
    clean,
    format_age,
    format_count,
    format_count_of,
    format_duration,
    format_loss,
    format_percent,
)

_MIB = 2**20


def plan_text(plan: TaskPlan, *, price_per_hour: float | None = None) -> RenderableType:
    """Describe jobs, memory of several packings, the chosen packing, time and cost."""
    memory = plan.memory
    planned = memory.margin * memory.capacity_bytes
    smallest, largest = plan.num_parameters
    sizes = f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"
    mean, longest = plan.row_tokens
    took = format_duration(plan.profile_s)
    measured = (
        f"measured earlier in {took} (--refresh measures again)"
        if plan.is_cached
        else f"measured now in {took}, and saved"
    )
    head = [
        ("jobs", f"{plan.num_jobs:,}, with {sizes} trainable parameters each"),
        ("rows", f"{mean:,.0f} tokens on average, {longest:,} in the longest"),
        (
            "memory",
            f"{_size(memory.fixed_bytes)} + {memory.bytes_per_token / 1024:,.1f} KiB per token of a micro-batch "
            f"+ {_size(plan.slot_bytes)} per slot, of {_size(planned)} "
            f"({format_percent(memory.margin)} of {_size(memory.capacity_bytes)})",
        ),
        (
            "",
            f"{measured}: {len(memory.points)} steps{_extent(plan)}, {_memory_error(memory)}",
        ),
    ]
    chosen = (
        f"max_slots {plan.max_slots}, max_tokens_per_step {plan.max_tokens_per_step:,}, "
        f"max_tokens_per_pass {plan.max_tokens_per_pass:,}"
        + (", gradient_checkpointing" if plan.gradient_checkpointing else "")
        + (f", {format_count_of(threads, 'CPU thread')}" if (threads := plan.throughput.num_threads) else "")
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
    """Return a table with a label and a text per line; a long text is wrapped and indented to the start of the text."""
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
    largest = _largest_step(plan)
    for packing in plan.packings:
        is_chosen = (packing.num_slots, packing.num_tokens) == (num_resident, plan.max_tokens_per_pass)
        table.add_row(
            f"{packing.num_slots}",
            f"{packing.num_tokens:,}",
            _size(packing.peak_bytes),
            f"{'~' if 0 < largest < packing.num_tokens else ''}{packing.tokens_per_s:,.0f}",
            "chosen" if is_chosen else "" if packing.fits else "does not fit",
        )
    return table


def _largest_step(plan: TaskPlan) -> int:
    """Return the tokens of the largest step whose speed was measured; 0 if none was."""
    return max((point.num_tokens for point in plan.throughput.points), default=0)


def _extent(plan: TaskPlan) -> str:
    largest = _largest_step(plan)
    return f" of at most {largest:,} tokens (~ marks speeds beyond that)" if largest else ""


def _priced(duration_s: float, cost: float | None, bound: str = "about") -> str:
    return f"{bound} {format_duration(duration_s)}" + ("" if cost is None else f", which costs {cost:,.2f}")


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / _MIB:,.1f} MiB"


def _memory_error(memory: MemoryProfile) -> str:
    """Describe how well the memory model fits the measured steps; say "too few" of two, which a line fits exactly."""
    if len({point.num_tokens for point in memory.points}) == 2:
        return "too few to know the memory estimate error"
    return (
        f"memory estimate error {format_percent(memory.error_median)} (at worst {format_percent(memory.error_worst)})"
    )


# Shows a task's data in the terminal, before anything is trained.
#
# The texts are not trusted: control characters are written out, and rich does not interpret markup in them.

TRAINED_STYLE = "bold black on green"
TRAINED_MARKS = ("⟦", "⟧")

_READ = "read:        the first {:,} rows of each dataset; all numbers below count these rows. alto plan reads all rows"


def preview_text(preview: DataPreview, *, marked: bool) -> RenderableType:
    """Return everything in ``preview``, one fact per line, then the examples.

    Args:
        marked: Whether trained tokens are put between marks instead of coloured.
    """
    counts, (shortest, median, longest) = preview.counts, preview.row_tokens
    has_labels = preview.form == "text_classification"
    trained = counts["train_trained_tokens"] / counts["train_tokens"]
    columns = ", ".join(f"{role} from {clean(column)}" for role, column in preview.columns.items())
    facts = [
        f"dataset:     {clean(preview.dataset)}",
        f"form:        {preview.form} ({columns})",
        f"tokenizer:   {clean(preview.model)}",
        *([] if preview.num_read is None else [_READ.format(preview.num_read)]),
        f"training:    {_split_line(preview, 'train')}",
        f"validation:  {_split_line(preview, 'validation')}",
        *([f"test:        {_split_line(preview, 'test')}"] if "test_rows" in counts else []),
        f"row length:  {shortest} to {longest} tokens, median {median:g}; max_length is {preview.max_length}",
        *([] if has_labels else [f"trained:     {trained:.0%} of the training tokens"]),
        *(f"note:        {clean(note)}" for note in preview.notes),
    ]
    marks = f"between {' and '.join(TRAINED_MARKS)}" if marked else "coloured"
    shown = "each with the label that it is trained to predict" if has_labels else f"trained text is {marks}"
    examples = [_example(example, number, marked) for number, example in enumerate(preview.examples, start=1)]
    return Group(
        *(Text(fact) for fact in facts),
        Text(f"\nThe first examples as the model sees them{', ' if has_labels else '; '}{shown}."),
        *examples,
    )


def visible(text: str) -> str:
    """Write out control, escape and bidirectional-override characters in ``text``; keep line ends and tabs."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text
    )


def _split_line(preview: DataPreview, split: str) -> str:
    counts = preview.counts
    rows, tokens = (format_count_of(counts[f"{split}_{what}s"], what) for what in ("row", "token"))
    truncated, skipped = (format_count(counts[f"{split}_{what}_rows"]) for what in ("truncated", "skipped"))
    return f"{rows}, {tokens}; {truncated} truncated, {skipped} left out"


def _example(example: PreviewExample, number: int, marked: bool) -> Text:
    text = Text(f"\n--- example {number}, {format_count_of(example.num_tokens, 'token')}\n")
    _append(text, example.segments, marked)
    if example.label:
        text.append(f"\n--- label: {visible(example.label)}\n")
    for side, segments in (("chosen", example.chosen), ("rejected", example.rejected)):
        if segments:
            text.append(f"\n--- {side}\n")
            _append(text, segments, marked)
    return text


def _append(text: Text, segments: Segments, marked: bool) -> None:
    opening, closing = TRAINED_MARKS
    for part, is_trained in segments:
        shown = visible(part)
        if is_trained and marked:
            text.append(f"{opening}{shown}{closing}")
        else:
            text.append(shown, style=TRAINED_STYLE if is_trained else "")


STYLES = {
    RunState.RUNNING: "cyan",
    RunState.INTERRUPTED: "yellow",
    RunState.FINISHED: "green",
    RunState.DAMAGED: "red",
}


def run_list(runs: Sequence[RunSummary], now: float) -> RenderableType:
    """Return a table with a row for each run or queue, and a line for each damaged one."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    # Commands take this name, so it is never cut.
    table.add_column("run", no_wrap=True, min_width=max((len(clean(run.root.name)) for run in runs), default=0))
    table.add_column("state", no_wrap=True)
    table.add_column("task")  # no `no_wrap` here: rich shrinks only columns that can wrap
    for heading in ("jobs", "best val", "done", "age"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            Text(clean(run.root.name)),
            Text(run.state.value, style=STYLES[run.state]),
            Text(_task(run), no_wrap=True, overflow="ellipsis"),
            "–" if run.num_jobs is None else format_count(run.num_jobs),
            format_loss(run.best_validation_loss),
            "–" if run.fraction_done is None else format_percent(run.fraction_done),
            format_age(now - run.started_at),
        )
    problems = [Text(f"{clean(run.root.name)}: {clean(run.problem)}", style="yellow") for run in runs if run.problem]
    return Group(table, *problems)


def _task(run: RunSummary) -> str:
    if run.is_queue:
        return format_count_of(len(run.tasks), "task")
    return clean(run.tasks[0]) if run.tasks else "–"
