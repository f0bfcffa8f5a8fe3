"""What commands print: progress while a task runs, and results as strict JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import typer
from rich.console import Console

from alto.records import TaskResult

__all__ = ["print_json", "progress", "result_facts"]


@contextlib.contextmanager
def progress(console: Console, *, silent: bool) -> Iterator[Any]:
    """The live table on a terminal, plain lines elsewhere, nothing when ``silent``."""
    if silent:
        yield None
        return
    from alto.export import LiveView, PlainView

    with LiveView(console) if console.is_terminal else PlainView(sys.stdout) as view:
        yield view


def print_json(facts: Mapping[str, Any]) -> None:
    """Print ``facts`` as strict JSON: a number that is not finite becomes null."""
    typer.echo(json.dumps(_strict(facts), indent=2, allow_nan=False))


def result_facts(result: TaskResult) -> dict[str, Any]:
    """A task's result as plain values."""
    return {**dataclasses.asdict(result), "samples_saved": result.samples_saved}


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value
