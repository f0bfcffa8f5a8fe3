"""Reading of a trace: recorded tasks of a cluster."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import Field

from alto.errors import SpecError
from alto.spec.keys import canonical_keys
from alto.spec.outside import read_bytes, strict_json
from alto.spec.quoting import quoted
from alto.spec.validation import SpecModel

__all__ = ["MAX_S", "MAX_TASKS", "MIN_S", "STEP_SHARE", "ArrivingTask", "read_trace"]

MIN_S, MAX_S = 0.001, 1e9
"""Bounds of durations: a millisecond and thirty years. Up to there, a float clock still counts every second."""

MAX_TASKS = 10**6
"""Maximum number of tasks of a simulation; more would take hours."""

STEP_SHARE = 0.5
"""Default share of a task's duration that is a fixed cost of its steps, whatever they train."""

_MAX_BYTES = 512 * 1024**2


class ArrivingTask(SpecModel):
    """One task of a trace.

    Attributes:
        arrival_s: Time of arrival, in seconds from the start.
        gpus: Number of GPUs the task runs on.
        duration_s: Seconds of all its work on these GPUs, without early exit.
        tenant: The tenant whose GPU quota the task counts against.
        priority: Priority of the task; a waiting task is never delayed by a task of lower priority.
        base: Base model; tasks on one GPU with the same base model may share an executor. Empty: the task shares none.
        step_share: Share of the duration that is a fixed cost of the steps, whatever they train; tasks that share an
            executor pay it once.
    """

    arrival_s: float = Field(ge=0, le=MAX_S, description="seconds from the start")
    gpus: int = Field(default=1, ge=1, description="GPUs of the task")
    duration_s: float = Field(ge=MIN_S, le=MAX_S, description="duration without early exit")
    tenant: str = Field(default="", description="tenant whose GPU quota the task counts against")
    priority: int = Field(default=0, description="priority")
    base: str = Field(default="", description="base model that it may share")
    step_share: float = Field(
        default=STEP_SHARE, ge=0, le=1, description="share of the duration that is a fixed cost of the steps"
    )

    def __init__(self, /, **values: Any) -> None:
        super().__init__(**canonical_keys(values, fields=type(self).model_fields, aliases={}, where="the trace"))


def read_trace(path: Path) -> tuple[ArrivingTask, ...]:
    """Read the tasks of a CSV file with a header, or of JSON lines.

    Raises:
        SpecError: The file cannot be read, a line is invalid, or there is no task or more than `MAX_TASKS`.
        UnknownKeyError: A task has no such key or column.
    """
    try:
        text = read_bytes(path, _MAX_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"trace should be a readable file of tasks, found {path}: {error}. Check the path.") from None
    rows = _csv_rows(text, path) if path.suffix.lower() == ".csv" else _json_rows(text, path)
    tasks: list[ArrivingTask] = []
    for number, row in rows:
        if len(tasks) == MAX_TASKS:
            raise SpecError(f"trace should hold at most {MAX_TASKS:,} tasks, found more in {path}. Take a part of it.")
        try:
            tasks.append(ArrivingTask(**row))
        except SpecError as error:
            raise type(error)(f"{path}:{number}: {error}") from None
    if not tasks:
        raise SpecError(f"trace should hold at least one task, found none in {path}. Check the file.")
    return tuple(tasks)


def _csv_rows(text: str, path: Path) -> Iterable[tuple[int, dict[str, Any]]]:
    rows = csv.DictReader(io.StringIO(text, newline=""))
    try:
        for row in rows:
            yield (
                rows.line_num,
                {str(key): _cell(str(key), value) for key, value in row.items() if value not in (None, "")},
            )
    except csv.Error as error:
        raise SpecError(f"{path}:{rows.line_num + 1} should be a line of CSV, found: {error}. Correct it.") from None


def _cell(key: str, text: Any) -> Any:
    """Convert a cell to its field's type; text that is not a number stays, and the field reports it."""
    kinds = {"arrival_s": float, "duration_s": float, "gpus": int, "priority": int, "step_share": float}
    try:
        return kinds[key](text) if key in kinds else text
    except (TypeError, ValueError):
        return text


def _json_rows(text: str, path: Path) -> Iterable[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = strict_json(line)
        except ValueError as error:
            raise SpecError(f"{path}:{number} should be a JSON object, found: {error}. Correct the line.") from None
        if not isinstance(row, dict):
            raise SpecError(f"{path}:{number} should be a JSON object, found {quoted(row)}. Correct the line.")
        yield number, row
