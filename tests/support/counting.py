"""How much work a call is, counted and not timed: the same on a machine that is busy."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

__all__ = ["TooManyCallsError", "num_calls"]

T = TypeVar("T")


class TooManyCallsError(BaseException):
    """More functions were called than a test allows; no code catches it by mistake."""


def num_calls(function: Callable[..., T], *args: Any, at_most: float = math.inf) -> tuple[int, T]:
    """How many functions, methods and builtins are called while ``function`` is, and what it returns.

    Raises:
        TooManyCallsError: More than ``at_most``; at once, so that nobody waits for work that has no end.
    """
    count = 0

    def on_event(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")
        if count > at_most:
            raise TooManyCallsError(f"expected at most {at_most:g} calls")

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        result = function(*args)
    finally:
        sys.setprofile(before)
    return count, result
