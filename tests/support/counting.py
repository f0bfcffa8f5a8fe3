"""Counts the work of a call instead of timing it; the count is the same on a busy machine."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

__all__ = ["TooManyCallsError", "num_calls"]

T = TypeVar("T")


class TooManyCallsError(BaseException):
    """Raised if more functions are called than a test allows; no code catches it by mistake."""


def num_calls(function: Callable[..., T], *args: Any, at_most: float = math.inf) -> tuple[int, T]:
    """Return the number of functions, methods and builtins that are called while ``function`` runs, and its result.

    Raises:
        TooManyCallsError: There are more than ``at_most`` calls; raised at once, so that a test does not wait for
            endless work.
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
