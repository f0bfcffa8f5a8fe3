"""A plan in the terminal: the choice is marked, and every line keeps its label."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console, RenderableType

from alto.records import (
    Gpu,
    MemoryPoint,
    MemoryProfile,
    PackingForecast,
    Placement,
    Schedule,
    TaskPlan,
    Throughput,
    ThroughputPoint,
)
from alto.views import plan_text, schedule_text

GIB = 2**30


def plan_of(**changes: Any) -> TaskPlan:
    facts: dict[str, Any] = {
        "task": "sums",
        "model": "alto-tiny",
        "device": "cpu",
        "num_jobs": 3,
        "num_parameters": (38_912, 155_648),
        "row_tokens": (71.2, 99),
        "slot_bytes": 2**20,
        "max_slots": 4,
        "max_tokens_per_step": 4096,
        "max_tokens_per_pass": 2048,
        "gradient_checkpointing": False,
        "peak_bytes": 5 * 10**8,
        "packings": tuple(
            PackingForecast(num_slots=slots, num_tokens=tokens, peak_bytes=10**8, fits=True, tokens_per_s=1000.0)
            for slots in (1, 3)
            for tokens in (1024, 2048)
        ),
        "memory": MemoryProfile(
            fixed_bytes=460 * 2**20,
            bytes_per_token=64 * 2**10,
            capacity_bytes=24 * GIB,
            margin=0.9,
            error_median=0.006,
            error_worst=0.01,
            points=(),
        ),
        "throughput": Throughput(step_s=0.1, job_s=0.0, token_s=0.0, eval_token_s=0.0, points=()),
        "duration_s": 20.0,
        "expected_duration_s": 10.0,
        "expected_step_s": 5.0,
        "modules": "all",
        "is_cached": True,
        "profile_s": 9.0,
        "notes": (
            "Measured steps took at least 29 % longer than on an idle machine: "
            + "other programs used the machine. " * 3,
        ),
    }
    return TaskPlan(**(facts | changes))


def lines_of(text: RenderableType, *, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(text)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("num_jobs", "chosen"), [(3, "3"), (1, "1")])
def test_the_chosen_packing_is_marked_where_there_are_fewer_jobs_than_slots(num_jobs: int, chosen: str) -> None:
    marked = [line.split() for line in lines_of(plan_text(plan_of(num_jobs=num_jobs))) if "chosen" in line]
    assert [(words[0], words[1]) for words in marked] == [(chosen, "2,048")]


def test_speeds_of_larger_steps_than_those_measured_are_marked() -> None:
    plan = plan_of()
    points = tuple(ThroughputPoint(num_jobs=1, num_tokens=num, duration_s=1.0, spread=0.0) for num in (512, 1024))
    lines = lines_of(plan_text(replace(plan, throughput=replace(plan.throughput, points=points))))
    rows = [line.split() for line in lines if line[:6].strip().isdigit()]
    rates = {row[1]: row[4].startswith("~") for row in rows}
    assert rates == {f"{packing.num_tokens:,}": packing.num_tokens > 1024 for packing in plan.packings}
    assert set(rates.values()) == {True, False}
    assert "0 steps of at most 1,024 tokens (~ marks speeds beyond that)" in " ".join(" ".join(lines).split())


def test_what_does_not_fit_into_a_line_continues_under_its_own_text() -> None:
    lines = lines_of(plan_text(plan_of()))
    assert all(len(line) <= 80 for line in lines)
    labels = ("jobs:", "rows:", "memory:", "packing:", "time:", "note:")
    first = next(index for index, line in enumerate(lines) if line.startswith("jobs:"))
    last = next(index for index, line in enumerate(lines) if line.startswith(" slots"))
    beginnings = [line[:12].strip() for line in lines[first:last]]
    assert set(beginnings) <= {"", *labels}, beginnings
    assert "measured earlier in 9 s (--refresh measures again): 0 steps" in " ".join(" ".join(lines).split())


def test_names_of_tasks_in_one_process_are_whole() -> None:
    names = ("a-task-with-a-rather-long-name-for-its-column", "ranks", "sums")
    placements = tuple(
        Placement(task=name, gpus=(Gpu("local", 0),), start_s=0.0, duration_s=78.0, executor="executor-1")
        for name in names
    )
    schedule = Schedule(placements=placements, bound_s=78.0, status="optimal", method="cp-sat")
    lines = lines_of(schedule_text(schedule))
    assert "…" not in "".join(lines)
    message = " ".join(" ".join(lines).split())
    assert "by these estimates no schedule that groups the tasks in the same way is shorter" in message


def test_the_disk_space_is_compared_with_what_is_free():
    plan = plan_of(disk_bytes=3 * GIB, disk_free_bytes=2 * GIB)
    assert "disk:       at most 3.00 GiB during training, of 2.00 GiB free" in lines_of(plan_text(plan))
    assert not [line for line in lines_of(plan_text(plan_of())) if line.startswith("disk:")]


@pytest.mark.parametrize("num_sizes", [2, 3])
def test_two_steps_say_nothing_of_how_exact_the_memory_estimate_is(num_sizes: int) -> None:
    points = tuple(MemoryPoint(num_jobs=1, num_tokens=100 * size, peak_bytes=GIB) for size in range(1, num_sizes + 1))
    shown = " ".join(" ".join(lines_of(plan_text(plan_of(memory=replace(plan_of().memory, points=points))))).split())
    assert ("memory estimate error 0.6 %" in shown) == (num_sizes == 3)
    assert ("too few to know the memory estimate error" in shown) == (num_sizes == 2)
