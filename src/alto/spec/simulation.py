"""The settings of a simulation: a cluster, arriving tasks, and failures."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from alto.base import quoted, read_bytes, strict_json
from alto.errors import SpecError, UnknownKeyError
from alto.spec.keys import canonical_keys
from alto.spec.load import overridden, read_mapping
from alto.spec.validation import SpecModel, is_finite_number

MIN_S, MAX_S = 0.001, 1e9
"""Bounds of durations: a millisecond and thirty years. Up to there, a float clock still counts every second."""

MAX_TASKS = 10**6
"""Maximum number of tasks of a simulation; more would take hours."""

STEP_SHARE = 0.5
"""Default share of a task's duration that its steps take regardless of how many tokens they train."""

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
        step_share: Share of the duration that the steps take regardless of how many tokens they train; tasks that share
            an executor pay it once.
    """

    arrival_s: float = Field(ge=0, le=MAX_S, description="seconds from the start")
    gpus: int = Field(default=1, ge=1, description="GPUs of the task")
    duration_s: float = Field(ge=MIN_S, le=MAX_S, description="duration without early exit")
    tenant: str = Field(default="", description="tenant whose GPU quota the task counts against")
    priority: int = Field(default=0, description="priority")
    base: str = Field(default="", description="base model that it may share")
    step_share: float = Field(
        default=STEP_SHARE, ge=0, le=1, description="share of the duration that steps take regardless of tokens"
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


MEASURED_EXIT_SHARES = (
    *(0.055, 0.057, 0.058, 0.060, 0.063, 0.063, 0.066, 0.069, 0.072, 0.075),
    *(0.082, 0.083, 0.092, 0.097, 0.107, 0.118, 0.136, 0.152, 0.183, 0.213),
)
"""Shares of the work that remain with the default early exit, measured by replay on twenty random parts, of 10 to 60
jobs, of the sweep in ``benchmarks/recordings/gsm8k-alto-tiny.json.gz``; ``tools/measure_exit_shares.py`` prints them.
This is one sweep on one small model: others will differ."""


class Simulation(SpecModel):
    """The settings of a simulation: a cluster, arriving tasks, and failures. The seed decides all random values.

    Attributes:
        nodes, gpus_per_node: Size of the cluster.
        trace: Recorded tasks: a CSV file with a header, or JSON lines, with ``arrival_s``, ``gpus``, ``duration_s``
            and optionally ``tenant``, ``priority``, ``base`` and ``step_share``. None generates tasks.
        num_tasks: Number of generated tasks.
        arrivals: Whether the generated tasks all arrive at the start, or at random times at the rate
            ``arrivals_per_hour``.
        arrivals_per_hour: Average number of tasks that arrive in an hour.
        gpus: Share of the generated tasks for each number of GPUs.
        duration_distribution: ``lognormal``, or ``pareto``, whose tail is heavier.
        duration_median_s, duration_p99_s: Median and 99th percentile of the durations without early exit; the two
            determine the distribution.
        bases: Number of base models of the generated tasks; tasks on one GPU with the same base model may share an
            executor. With 0, no task shares.
        step_share: Share of a generated task's duration that its steps take regardless of how many tokens they train;
            tasks that share an executor pay it once.
        early_exit_shares: With early exit, a task does only a share of its work, which is drawn from this list. The
            default was measured by replay on a recorded sweep. An empty list simulates no early exit.
        estimate_error: Largest factor by which estimates are too high or too low until a task is half done.
        gpu_mtbf_hours: Average hours between two losses of a GPU; None means that no GPU is lost.
        gpu_repair_hours: Hours until a lost GPU is back.
        crashes_per_hour: Average number of crashes of an executor in an hour of work.
        checkpoint_interval_s: Maximum work, in seconds, that a task loses when its executor is lost.
        quotas: Maximum number of GPUs that a tenant has at a time.
        max_attempts, backoff_s: Number of failures after which a task is given up, and the pause after the first
            failure, in seconds.
        methods: Scheduling methods; the default is ``fifo``, ``sjf``, ``lpt``, and ``cp-sat`` if there are few tasks.
        solver_s: Seconds on this machine, not on the simulated cluster, that a solver has for all plans.
        seed: Seed of all random values.
        num_seeds: Number of simulations that decide how many GPUs are enough.

    Raises:
        UnknownKeyError: A key is not one of the above.
        SpecError: A value is out of bounds, or ``arrivals_per_hour`` does not go with ``arrivals``.
    """

    nodes: int = Field(default=1, ge=1, le=4096, description="machines of the cluster")
    gpus_per_node: int = Field(default=8, ge=1, le=1024, description="GPUs of each machine")
    trace: tuple[ArrivingTask, ...] | None = Field(default=None, description="file of tasks")
    num_tasks: int = Field(default=100, ge=1, le=MAX_TASKS, description="number of generated tasks")
    arrivals: Literal["at_once", "poisson"] = Field(default="at_once", description="arrival of tasks")
    arrivals_per_hour: float | None = Field(default=None, ge=1e-3, le=1e9, description="tasks that arrive in an hour")
    gpus: Mapping[int, float] = Field(
        default={1: 0.6, 2: 0.25, 4: 0.15}, description="share of the tasks for each number of GPUs"
    )
    duration_distribution: Literal["lognormal", "pareto"] = Field(
        default="lognormal", description="the distribution of durations"
    )
    duration_median_s: float = Field(
        default=3600.0, ge=MIN_S, le=MAX_S, description="median duration without early exit"
    )
    duration_p99_s: float = Field(default=36000.0, ge=MIN_S, le=MAX_S, description="99th percentile of the durations")
    bases: int = Field(default=0, ge=0, le=MAX_TASKS, description="base models that generated tasks may share")
    step_share: float = Field(
        default=STEP_SHARE,
        ge=0,
        le=1,
        description="share of a generated task's duration that steps take regardless of tokens",
    )
    early_exit_shares: tuple[float, ...] = Field(
        default=MEASURED_EXIT_SHARES, description="shares of its work that a task does with early exit"
    )
    estimate_error: float = Field(default=1.0, ge=1, le=1000, description="largest factor by which estimates are wrong")
    gpu_mtbf_hours: float | None = Field(
        default=None, ge=0.01, le=1e9, description="average hours between two losses of a GPU"
    )
    gpu_repair_hours: float = Field(default=1.0, ge=0.01, le=1e6, description="hours until a lost GPU is back")
    crashes_per_hour: float = Field(
        default=0.0, ge=0, le=1e6, description="average number of crashes of an executor in an hour"
    )
    checkpoint_interval_s: float = Field(
        default=60.0, ge=0, le=MAX_S, description="maximum seconds of work lost with an executor"
    )
    quotas: Mapping[str, int] = Field(default={}, description="maximum number of GPUs of a tenant")
    max_attempts: int = Field(default=3, ge=1, le=1000, description="number of failures after which a task is given up")
    backoff_s: float = Field(default=10.0, ge=0, le=MAX_S, description="seconds of the pause after the first failure")
    methods: tuple[str, ...] = Field(default=(), description="how tasks are scheduled")
    solver_s: float = Field(default=5.0, gt=0, le=MAX_S, description="maximum seconds of a solver in one simulation")
    seed: int = Field(default=42, ge=0, description="seed of all random values")
    num_seeds: int = Field(
        default=5, ge=1, le=1000, description="number of simulations that decide how many GPUs are enough"
    )

    def __init__(self, /, **values: Any) -> None:
        given = canonical_keys(values, fields=type(self).model_fields, aliases={}, where="the simulation")
        for key in ("early_exit_shares", "methods", "trace"):
            if isinstance(given.get(key), list):
                given[key] = tuple(given[key])
        super().__init__(**given)

    def replace(self, **changes: Any) -> Self:
        return type(self)(**({name: getattr(self, name) for name in type(self).model_fields} | changes))

    @field_validator("gpus", mode="before")
    @classmethod
    def _check_gpus(cls, gpus: object) -> object:
        if not isinstance(gpus, Mapping) or not gpus or not all(_is_share(*pair) for pair in gpus.items()):
            raise ValueError(
                f"should map numbers of GPUs to shares above 0, found {quoted(gpus)}. For example: {{1: 0.7, 4: 0.3}}."
            )
        return {count: float(share) for count, share in gpus.items()}

    @field_validator("early_exit_shares")
    @classmethod
    def _check_shares(cls, shares: tuple[float, ...]) -> tuple[float, ...]:
        if not all(0 < share <= 1 for share in shares):
            raise ValueError(f"should be shares above 0 and at most 1, found {quoted(shares)}. For example: [0.1].")
        return shares

    @field_validator("quotas")
    @classmethod
    def _check_quotas(cls, quotas: Mapping[str, int]) -> Mapping[str, int]:
        if any(quota < 1 for quota in quotas.values()):
            raise ValueError(f"should give every tenant at least 1 GPU, found {quoted(dict(quotas))}. Correct it.")
        return quotas

    @model_validator(mode="after")
    def _check_together(self) -> Simulation:
        if (self.arrivals == "poisson") != (self.arrivals_per_hour is not None):
            raise ValueError(
                f"arrivals_per_hour belongs to 'arrivals: poisson', found {self.arrivals_per_hour} with "
                f"{self.arrivals!r}. Give both or neither."
            )
        if self.duration_p99_s <= self.duration_median_s:
            raise ValueError(
                f"duration_p99_s should be above duration_median_s, found {self.duration_p99_s} and "
                f"{self.duration_median_s}. Raise it."
            )
        return self


def load_simulation(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Simulation:
    """Read a simulation from a YAML file; the path of its trace is relative to the file.

    Args:
        overrides: ``key=value`` texts; see :func:`alto.spec.load_task`.

    Raises:
        SpecError: See :func:`alto.spec.load_task`; or the trace cannot be read.
        UnknownKeyError: See :class:`Simulation`.
    """
    path = Path(path)
    values = dict(overridden(read_mapping(path, "simulation", "nodes: 4"), overrides))
    try:
        if isinstance(values.get("trace"), str):
            values["trace"] = read_trace(path.parent / values["trace"])
        return Simulation(**{str(key): value for key, value in values.items()})
    except (SpecError, UnknownKeyError) as error:
        raise type(error)(f"In {path}: {error}") from None


def _is_share(count: object, share: Any) -> bool:
    return type(count) is int and count >= 1 and is_finite_number(share) and share > 0
