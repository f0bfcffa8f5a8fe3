"""``alto import``: tasks from configurations of other tools."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from alto.cli.options import Overrides
from alto.errors import SpecError
from alto.importing import ImportedFile, NoteKind, import_file, imported_task

__all__ = ["import_tasks"]


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
