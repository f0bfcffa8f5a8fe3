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
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write the comparison as a page too.", callback=reachable),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON and nothing else.")] = False,
) -> None:
    """Show what RUN and OTHER were trained on, how good their best adapters are, and which settings differ."""
    from alto.results import load_run

    compared = load_run(run).compare(other)
    path = None if html is None else compared.write_html(html)
    if as_json:
        print_json(dataclasses.asdict(compared))
        return
    console = Console()
    console.print(compared)
    if path is not None:
        console.print(f"page: {path}", soft_wrap=True, highlight=False, markup=False)
