"""What a search knows of a configuration that was tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Trial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One configuration, and how far it came.

    Attributes:
        values: Its place in the search space: canonical names to values as the space spells them.
        losses: Its value at every rung that it has reached, at exactly equal shares of the steps; lower is better.
        final: Its best value, once it has done all its steps; None before.
        has_ended: It trains no more.
        is_infeasible: It ended because it does not fit into memory.
    """

    values: Mapping[str, Any]
    losses: tuple[float, ...] = ()
    final: float | None = None
    has_ended: bool = False
    is_infeasible: bool = False
