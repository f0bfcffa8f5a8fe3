"""The command-line app: all commands, the version, exit codes, and the report of errors."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from alto.cli import (
    control,
    evaluate,
    export,
    listing,
    plan,
    run,
    serve,
    show,
    simulate,
    tune,
)
from alto.cli.output import print_error
from alto.errors import AltoError

app = typer.Typer(
    name="alto",
    help="Tune LoRA adapters: train many configurations together on one frozen base model, and stop the losers early.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_FIRST, _RUNS, _QUEUES, _SERVICE = "A task", "Runs and their adapters", "Many tasks", "A service"

app.command(rich_help_panel=_FIRST)(tune.tune)
app.command(rich_help_panel=_FIRST)(plan.preview)
app.command(rich_help_panel=_FIRST)(plan.plan)
app.command("import", rich_help_panel=_FIRST)(plan.import_tasks)
app.command(rich_help_panel=_RUNS)(show.show)
app.command("list", rich_help_panel=_RUNS)(listing.list_)
app.command(rich_help_panel=_RUNS)(tune.resume)
app.command(rich_help_panel=_RUNS)(tune.refit)
app.add_typer(control.app, rich_help_panel=_RUNS)
app.command(rich_help_panel=_RUNS)(show.report)
app.command(rich_help_panel=_RUNS)(show.compare)
app.command("eval", rich_help_panel=_RUNS)(evaluate.evaluate)
app.command(rich_help_panel=_RUNS)(export.export)
app.command(rich_help_panel=_RUNS)(listing.prune)
app.command(rich_help_panel=_QUEUES)(run.run)
app.command(rich_help_panel=_QUEUES)(control.submit)
app.command(rich_help_panel=_QUEUES)(control.cancel)
app.command(rich_help_panel=_QUEUES)(control.drain)
app.command(rich_help_panel=_QUEUES)(simulate.simulate)
app.command(rich_help_panel=_SERVICE)(serve.serve)
app.add_typer(serve.keys, rich_help_panel=_SERVICE)


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
    """Tune LoRA adapters: train many configurations together on one frozen base model, and stop the losers early."""


def main() -> None:
    """Run the command line; exit with 0 for success, 1 for an error of ALTO, 2 for wrong usage."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal whose encoding lacks a character shows a question mark.
            stream.reconfigure(errors="replace")
    try:
        app(prog_name="alto")  # the same name for python -m alto
    except AltoError as error:
        print_error(error)
        sys.exit(1)
