"""The record of a configuration that a search has tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Trial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One configuration and its progress.

    Attributes:
        values: Its point in the search space: values by canonical name, spelled as in the space.
        losses: Its value at every rung that it has reached, at exactly equal shares of the steps; lower is better.
        final: Its best value once it has done all its steps; None before.
        has_ended: Whether it no longer trains.
        is_infeasible: Whether it ended because it does not fit into memory.
    """

    values: Mapping[str, Any]
    losses: tuple[float, ...] = ()
    final: float | None = None
    has_ended: bool = False
    is_infeasible: bool = False
