"""The command line: reads arguments and files, shows what happens, says what went wrong in one message."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from alto.errors import AltoError
from alto.records import TaskResult
from alto.spec import load_task

__all__ = ["app", "main"]

app = typer.Typer(
    name="alto",
    help="Tune LoRA adapters: many configurations together on one frozen base model, the losers stopped early.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

OutputDir = Annotated[Path, typer.Option("--output-dir", "-o", help="Folder in which run directories are made.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        import alto

        typer.echo(f"alto {alto.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Tune LoRA adapters: many configurations together on one frozen base model, the losers stopped early."""


@app.command()
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
    with _progress(console, silent=quiet or as_json) as view:
        engine = Engine(output_dir=output_dir, observers=[view.observe] if view else [])
        result = engine.tune(task)
    if as_json:
        typer.echo(json.dumps(_plain(result), indent=2, allow_nan=False))
    elif view:
        console.print(final_summary(view.history, result.run_dir))
        console.print(f"report:  {Path(result.run_dir) / 'report.html'}", soft_wrap=True, highlight=False, markup=False)
    else:
        typer.echo(result.adapter_dir)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
) -> None:
    """Show the jobs of RUN and write its report.html anew."""
    from alto.export import final_summary, write_report
    from alto.export.history import read_history

    history = read_history(run)
    path = write_report(run)
    console = Console()
    console.print(final_summary(history, run, max_rows=None))
    console.print(f"report:  {path}", soft_wrap=True, highlight=False, markup=False)


def main() -> None:
    """Entry point: exit code 0 for success, 1 for an error ALTO names, 2 for wrong usage."""
    try:
        app()
    except AltoError as error:
        Console(stderr=True).print(f"{type(error).__name__}: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)


@contextlib.contextmanager
def _progress(console: Console, *, silent: bool) -> Iterator[Any]:
    """The live table on a terminal, plain lines elsewhere, nothing when ``silent``."""
    if silent:
        yield None
        return
    from alto.export import LiveView, PlainView

    with LiveView(console) if console.is_terminal else PlainView(sys.stdout) as view:
        yield view


def _plain(result: TaskResult) -> dict[str, Any]:
    facts = dataclasses.asdict(result)
    facts["samples_saved"] = result.samples_saved
    strict: dict[str, Any] = _strict(facts)
    return strict


def _strict(value: Any) -> Any:
    """``value`` as strict JSON can carry it: a number that is not finite becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value
