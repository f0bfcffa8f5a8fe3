"""``alto tune``: train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from alto.cli.output import print_json, progress, result_facts
from alto.spec import load_task

__all__ = ["tune"]

OutputDir = Annotated[Path, typer.Option("--output-dir", "-o", help="Folder in which run directories are made.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file.")]


def tune(
    file: Annotated[Path, typer.Argument(help="Task file (YAML).")],
    output_dir: OutputDir = Path("runs"),
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Run the task in FILE and keep its best adapter."""
    task = load_task(file, overrides or ())
    from alto.engine import Engine
    from alto.export import final_summary

    console = Console()
    with progress(console, silent=quiet or as_json) as view:
        engine = Engine(output_dir=output_dir, observers=[view.observe] if view else [])
        result = engine.tune(task)
    if as_json:
        print_json(result_facts(result))
    elif view:
        console.print(final_summary(view.history, result.run_dir))
        console.print(f"report:  {Path(result.run_dir) / 'report.html'}", soft_wrap=True, highlight=False, markup=False)
    else:
        typer.echo(result.adapter_dir)
