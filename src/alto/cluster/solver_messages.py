"""Messages between the solver's process and its caller, as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TypeVar

from pydantic import TypeAdapter

from alto.records import Schedule
from alto.scheduler import SchedulingProblem

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The arguments of :func:`alto.scheduler.schedule_tasks`."""

    problem: SchedulingProblem
    method: str
    time_limit_s: float
    hint: Schedule | None
    gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The schedule; or class and message of the ALTO error that was raised.

    Attributes:
        schedule: None after an error.
        error: Class of the error; empty if there is none.
    """

    schedule: Schedule | None = None
    error: str = ""
    message: str = ""


CALLS, ANSWERS = TypeAdapter(Call), TypeAdapter(Answer)


def encoded(codec: TypeAdapter[T], value: T) -> bytes:
    return json.dumps(codec.dump_python(value)).encode()


def decoded(codec: TypeAdapter[T], text: bytes) -> T:
    return codec.validate_python(json.loads(text))
