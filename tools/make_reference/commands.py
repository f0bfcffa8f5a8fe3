"""The section about commands."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer

from alto.cli import app
from tools.make_reference.markdown import code, codes, table

__all__ = ["commands_section"]


def commands_section() -> str:
    root = typer.main.get_command(app)
    sections = [
        "## Commands\n\nExit code 0 means success, 1 an error of ALTO, 2 wrong usage, 130 an interruption by "
        "Ctrl-C, 143 by SIGTERM. `alto --version` shows the version; `--help` after a command shows its options.\n"
    ]
    for words, command in _commands(root, ("alto",)):
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = [p for p in command.params if p.param_type_name == "option"]
        usage = " ".join([*words, *map(_argument, arguments), "[OPTIONS]" * bool(options)])
        rows = [[code(p.metavar or p.name.upper()), p.help] for p in arguments]
        kinds = get_type_hints(command.callback)
        rows += [[_option(p), p.help + _values_of(p, kinds[p.name])] for p in options]
        sections.append(
            f"### {' '.join(words)}\n\n`{usage.strip()}`: {command.help}\n\n{table(('argument', ''), rows)}\n"
        )
    return "\n".join(sections)


def _commands(command: Any, words: tuple[str, ...]) -> Iterable[tuple[tuple[str, ...], Any]]:
    if hasattr(command, "commands"):
        for name, child in command.commands.items():
            yield from _commands(child, (*words, name))
    else:
        yield words, command


def _argument(param: Any) -> str:
    name = param.metavar or param.name.upper()
    return name if param.required else f"[{name}]"


def _option(param: Any) -> str:
    names = [*sorted(param.opts, key=len), *param.secondary_opts]
    takes = "" if param.is_flag else f" {param.metavar or names[-1].strip('-').replace('-', '_').upper()}"
    return codes([*names[:-1], names[-1] + takes])


def _values_of(param: Any, kind: Any) -> str:
    values = f" One of {codes(get_args(kind))}." if get_origin(kind) is Literal else ""
    if param.multiple:
        return values + " May be given several times."
    return values if param.is_flag or param.default is None else f"{values} Default: `{param.default}`."
