"""The command-line app: all commands, the version, exit codes, and the report of errors."""

from __future__ import annotations

import ast
import io
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from alto.errors import AltoError

_FIRST, _RUNS, _QUEUES, _SERVICE = "A task", "Runs and their adapters", "Many tasks", "A service"

_COMMANDS: Mapping[str, tuple[str, str, str]] = {
    "demo": (_FIRST, "demo", "demo"),
    "doctor": (_FIRST, "doctor", "doctor"),
    "init": (_FIRST, "init", "init"),
    "tune": (_FIRST, "tune", "tune"),
    "preview": (_FIRST, "plan", "preview"),
    "plan": (_FIRST, "plan", "plan"),
    "import": (_FIRST, "plan", "import_tasks"),
    "show": (_RUNS, "show", "show"),
    "list": (_RUNS, "listing", "list_"),
    "resume": (_RUNS, "tune", "resume"),
    "refit": (_RUNS, "tune", "refit"),
    "job": (_RUNS, "control", "app"),
    "report": (_RUNS, "show", "report"),
    "compare": (_RUNS, "show", "compare"),
    "eval": (_RUNS, "evaluate", "evaluate"),
    "export": (_RUNS, "export", "export"),
    "prune": (_RUNS, "listing", "prune"),
    "run": (_QUEUES, "run", "run"),
    "submit": (_QUEUES, "control", "submit"),
    "cancel": (_QUEUES, "control", "cancel"),
    "drain": (_QUEUES, "control", "drain"),
    "simulate": (_QUEUES, "simulate", "simulate"),
    "serve": (_SERVICE, "serve", "serve"),
    "keys": (_SERVICE, "serve", "keys"),
}
"""For every command: its panel in the help, its module, and the function or group there."""


class _Commands(Mapping[str, Any]):
    """The commands by name; the module of a command is imported when the command is looked up."""

    def __getitem__(self, name: str) -> Any:
        panel, module, attribute = _COMMANDS[name]
        found = getattr(import_module(f"alto.cli.{module}"), attribute)
        if not isinstance(found, typer.Typer):
            one = typer.Typer(add_completion=False)
            one.command(name, rich_help_panel=panel)(found)
            return typer.main.get_command(one)
        group = typer.main.get_command(found)
        assert isinstance(group, TyperGroup)
        group.rich_help_panel = panel
        return group

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


class _App(TyperGroup):
    """The group of all commands. Its help and its completion import no command, so that they are fast."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: Any = _Commands()

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the help."""
        return list(self.commands)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help from the docstrings of the commands."""
        self.commands = _summaries()
        super().format_help(ctx, formatter)
        self.commands = _Commands()

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Return the commands that begin with ``incomplete``, and the options."""
        self.commands = _summaries()
        found = super().shell_complete(ctx, incomplete)
        self.commands = _Commands()
        return found


def _summaries() -> dict[str, TyperCommand]:
    """Return commands that have a name and a help, and cannot be run."""
    return {
        name: TyperCommand(name, help=_help(module, attribute), rich_help_panel=panel)
        for name, (panel, module, attribute) in _COMMANDS.items()
    }


def _help(module: str, attribute: str) -> str:
    """Read the docstring of a function, or the ``help`` of a group, in a module that is not imported."""
    for node in _parsed(module).body:
        match node:
            case ast.FunctionDef(name=name) if name == attribute:
                return ast.get_docstring(node) or ""
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(keywords=keywords)) if name == attribute:
                return next(str(ast.literal_eval(keyword.value)) for keyword in keywords if keyword.arg == "help")
    raise AssertionError(f"{module} has no {attribute}")


@cache
def _parsed(module: str) -> ast.Module:
    return ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))


app = typer.Typer(
    name="alto",
    cls=_App,
    help="Tune LoRA adapters: train many configurations together on one frozen base model, and stop the losers early.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


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
        from alto.cli.output import print_error

        print_error(error)
        sys.exit(1)
