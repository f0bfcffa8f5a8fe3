"""``alto preview``: data as the model will see it."""

from __future__ import annotations

import dataclasses
import io
import sys
from typing import Annotated

import typer
from rich.console import Console

from alto.cli.completion import complete_task_key
from alto.cli.output import print_json
from alto.spec import Task, build_task, load_task

__all__ = ["preview"]

DEFAULT_MODEL = "alto-tiny"


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
    from alto.export import preview_text

    shown = Engine().preview(task, num_rows=num_rows)
    console = Console()
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
