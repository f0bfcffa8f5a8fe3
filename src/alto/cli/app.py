"""All commands, and their common parts: the version, the exit code, the report of an error."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from alto.cli import (
    compare,
    evaluate,
    export,
    importing,
    job,
    listing,
    plan,
    preview,
    queue,
    refit,
    report,
    resume,
    run,
    show,
    simulate,
    tune,
)
from alto.cli.output import print_error
from alto.errors import AltoError

__all__ = ["app", "main"]

app = typer.Typer(
    name="alto",
    help="Tune LoRA adapters: many configurations together on one frozen base model, the losers stopped early.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(tune.tune)
app.command()(run.run)
app.command()(resume.resume)
app.command()(refit.refit)
app.command()(plan.plan)
app.command()(simulate.simulate)
app.command()(show.show)
app.add_typer(job.app)
app.command()(queue.submit)
app.command()(queue.cancel)
app.command()(queue.drain)
app.command("list")(listing.list_)
app.command()(report.report)
app.command()(compare.compare)
app.command()(preview.preview)
app.command("import")(importing.import_tasks)
app.command("eval")(evaluate.evaluate)
app.command()(export.export)


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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal whose encoding has no star shows a question mark.
            stream.reconfigure(errors="replace")
    try:
        app(prog_name="alto")  # also for python -m alto
    except AltoError as error:
        print_error(error)
        sys.exit(1)
