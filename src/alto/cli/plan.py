"""``alto plan``: memory and time of tasks, before anything is trained."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from alto.cli.completion import complete_task_key
from alto.cli.options import Strategy
from alto.cli.output import print_json
from alto.records import TaskPlan
from alto.runs.device_hours import price_of_hour
from alto.spec import load_task

__all__ = ["plan"]


def plan(
    files: Annotated[list[Path], typer.Argument(help="Task files (YAML).")],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override a key of every file.", autocompletion=complete_task_key
        ),
    ] = None,
    gpu_hour_price: Annotated[
        float | None,
        typer.Option(
            "--gpu-hour-price",
            min=0,
            help="Price of an hour of the device, to show the cost; by default $ALTO_GPU_HOUR_PRICE, or the budget's "
            "price.",
        ),
    ] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again, even if a measurement is cached.")] = False,
    total_gpus: Annotated[
        int | None,
        typer.Option(
            "--total-gpus", min=1, help="Number of GPUs that several tasks share; of CPU slots if there are no GPUs."
        ),
    ] = None,
    strategy: Strategy = "adapter_parallel",
    method: Annotated[
        str, typer.Option("--method", help="Method of scheduling several tasks: cp-sat, milp, lpt, sjf, fifo.")
    ] = "cp-sat",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON and nothing else.")] = False,
) -> None:
    """Measure memory and time of the tasks in FILES, and show how they would be packed and scheduled."""
    tasks = [load_task(file, overrides or ()) for file in files]
    from alto.engine import Engine
    from alto.export import PlainView, plan_text, schedule_text

    # On stderr, because a program may read the plan from stdout.
    view = PlainView(sys.stderr)
    engine = Engine(strategy=strategy, total_gpus=total_gpus, observers=[] if as_json else [view.observe])
    console = Console()
    facts = []
    for task in tasks:
        found = engine.plan(task, refresh=refresh)
        price = price_of_hour(gpu_hour_price, task.search.budget.gpu_hour_price)
        facts.append(_facts(found, price))
        if not as_json:
            console.print(plan_text(found, price_per_hour=price))
    schedule = engine.schedule(tasks, method=method, refresh=refresh) if len(tasks) > 1 else None
    if as_json:
        print_json({"tasks": facts, "schedule": dataclasses.asdict(schedule) if schedule is not None else None})
    elif schedule is not None:
        console.print(schedule_text(schedule))


def _facts(found: TaskPlan, price_per_hour: float | None) -> dict[str, object]:
    facts: dict[str, object] = dataclasses.asdict(found)
    if price_per_hour is not None:
        facts["cost"], facts["expected_cost"] = found.cost(price_per_hour)
    return facts
