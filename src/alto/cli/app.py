"""All commands, and what they have in common: the version, the exit code, how an error is said."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from alto.cli import report, tune
from alto.errors import AltoError

__all__ = ["app", "main"]

app = typer.Typer(
    name="alto",
    help="Tune LoRA adapters: many configurations together on one frozen base model, the losers stopped early.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(tune.tune)
app.command()(report.report)


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


def main() -> None:
    """Entry point: exit code 0 for success, 1 for an error ALTO names, 2 for wrong usage."""
    try:
        app()
    except AltoError as error:
        Console(stderr=True).print(f"{type(error).__name__}: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
