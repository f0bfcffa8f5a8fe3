"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from alto.cli.completion import complete_task_key

__all__ = ["AsJson", "OutputDir", "Overrides", "Quiet", "Strategy", "TrustRemoteCode"]

OutputDir = Annotated[Path, typer.Option("--output-dir", "-o", help="Folder in which run directories are made.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file.", autocompletion=complete_task_key),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]
Strategy = Annotated[
    str, typer.Option("--strategy", help="How a task uses several GPUs: adapter_parallel, or single for one process.")
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Allow the Python code that comes with the base model to run; the files of a run cannot allow it.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
