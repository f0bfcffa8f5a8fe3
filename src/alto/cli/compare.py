"""``alto compare``: two finished runs side by side."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from alto.cli.output import print_json
from alto.cli.paths import Run, reachable

__all__ = ["compare"]


def compare(
    run: Run,
    other: Annotated[Path, typer.Argument(help="Run directory to compare it with.", callback=reachable)],
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON and nothing else.")] = False,
) -> None:
    """Show what RUN and OTHER were trained on, what their best adapters are worth, and which settings differ."""
    from alto.results import load_run

    compared = load_run(run).compare(other)
    if as_json:
        print_json(dataclasses.asdict(compared))
    else:
        Console().print(compared)
