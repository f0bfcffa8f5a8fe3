"""``alto plan``: memory and time of tasks, before anything is trained."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from alto.cli.options import DEFAULT_MODEL, Overrides, Strategy, complete_task_key
from alto.cli.output import output_console, print_json
from alto.errors import SpecError
from alto.importing import ImportedFile, NoteKind, import_file, imported_task
from alto.records import TaskPlan
from alto.runs.progress import price_of_hour
from alto.spec import Task, build_task, load_task


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
    from alto.views import PlainView, plan_text, schedule_text

    # On stderr, because a program may read the plan from stdout.
    view = PlainView(sys.stderr)
    engine = Engine(strategy=strategy, total_gpus=total_gpus, observers=[] if as_json else [view.observe])
    console = output_console()
    facts = []
    for task in tasks:
        task_plan = engine.plan(task, refresh=refresh)
        price = price_of_hour(gpu_hour_price, task.search.budget.gpu_hour_price)
        facts.append(_facts(task_plan, price))
        if not as_json:
            console.print(plan_text(task_plan, price_per_hour=price))
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


def preview(
    file: Annotated[str, typer.Argument(help="Task file (YAML), or a dataset: a file, a preset or a hub id.")],
    model: Annotated[
        str | None,
        typer.Option("--model", help=f"Model whose tokenizer is used; a dataset's default is {DEFAULT_MODEL}."),
    ] = None,
    num_rows: Annotated[int, typer.Option("--rows", min=0, help="Number of examples to show.")] = 3,
    form: Annotated[
        str | None, typer.Option("--format", help="Format of the rows; by default detected from their columns.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override a key of the task.", autocompletion=complete_task_key
        ),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Mark trained tokens with ⟦…⟧ instead of colour.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON and nothing else.")] = False,
) -> None:
    """Show the first examples of FILE as the model will see them, and how many rows are used, cut and left out.

    If the texts have 4 MiB or more, only the first rows are read and counted.
    """
    task = _task(file, model, form, overrides or [])
    from alto.engine import Engine
    from alto.views import preview_text

    shown = Engine().preview(task, num_rows=num_rows)
    console = output_console()
    if as_json:
        print_json(dataclasses.asdict(shown))
    elif console.is_terminal and not plain:
        console.print(preview_text(shown, marked=False), soft_wrap=True, highlight=False)
    else:
        lines = io.StringIO()
        Console(file=lines, color_system=None).print(preview_text(shown, marked=True), soft_wrap=True, highlight=False)
        encoding = sys.stdout.encoding or "utf-8"
        typer.echo(lines.getvalue().encode(encoding, "replace").decode(encoding), nl=False)


def _task(file: str, model: str | None, form: str | None, overrides: list[str]) -> Task:
    given = {key: value for key, value in (("model", model), ("dataset_format", form)) if value is not None}
    if file.lower().endswith((".yaml", ".yml")):
        return load_task(file, overrides).replace(**given)
    return build_task({"model": DEFAULT_MODEL, "dataset": file, **given}, overrides)


def import_tasks(
    files: Annotated[
        list[Path],
        typer.Argument(help="Configurations (YAML or JSON); several become the configurations of one task."),
    ],
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="Task file to write; without it, the task is printed.")
    ] = None,
    tool: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Tool that the configurations are for: llamafactory, axolotl or trl; by default recognised by their "
            "keys.",
        ),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Turn configurations of LLaMA-Factory, Axolotl or TRL into a task, and report every key that is not taken over."""
    if to is not None and to.exists():
        raise SpecError(f"--to: expected a new file, found {to}. Remove it, or name a different file.")
    imported = []
    for file in files:
        imported.append(import_file(file, tool, overrides or ()))
        _report(imported[-1])
    task = imported_task(imported, overrides or ())
    text = task.to_yaml(Path.cwd() if to is None else to.parent)
    if to is None:
        typer.echo(text, nl=False)
        return
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(
            f"--to: expected a file that can be written, found {to}: {error}. Name a different file."
        ) from None
    typer.echo(f"{to}: {len(task.task.jobs)} {'job' if len(task.task.jobs) == 1 else 'jobs'}; see: alto preview {to}")


def _report(file: ImportedFile) -> None:
    """Print on stderr how each key of a file was handled, the most important first."""
    typer.echo(f"{file.path} ({file.tool.title})", err=True)
    for line in _lines(file):
        typer.echo(f"  {line}", err=True)


def _lines(file: ImportedFile) -> Iterable[str]:
    for kind in NoteKind:
        yield from (str(note) for note in file.notes if note.kind is kind)
