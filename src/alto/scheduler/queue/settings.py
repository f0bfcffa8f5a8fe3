"""How a queue plans and retries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from alto.errors import SpecError
from alto.scheduler.inter_task import LIST_METHODS

__all__ = ["MAX_ATTEMPTS_IN_ALL", "QueueSettings"]

MAX_ATTEMPTS_IN_ALL = 10
"""Attempts of a task, those whose GPUs were lost among them, as a multiple of ``max_attempts``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """How a queue plans and retries.

    Attributes:
        quotas: The most GPUs a tenant has at a time; a tenant that is not named has no limit.
        estimate_change: Share of its estimated duration by which the estimate of a task must move for a new plan.
        max_attempts: A task that has failed so often is given up when the pause after its last failure is over. An
            attempt one of whose GPUs was lost is not counted, even where the loss is reported as late as in that
            pause; but no task is tried more than `MAX_ATTEMPTS_IN_ALL` times as often.
        backoff_s: Pause after the first failure of a task; doubled after each further one.
        max_backoff_s: Largest pause.
        max_planned: Where more tasks than this wait and run, a plan is of those alone that start now, by
            ``list_method``; unless some have priority, whose later starts others must not delay. None: never.
        list_method: One of :data:`LIST_METHODS`.

    Raises:
        SpecError: A value is out of its bounds.
    """

    quotas: Mapping[str, int] = field(default_factory=dict)
    estimate_change: float = 0.25
    max_attempts: int = 3
    backoff_s: float = 10.0
    max_backoff_s: float = 600.0
    max_planned: int | None = None
    list_method: str = "lpt"

    def __post_init__(self) -> None:
        _check("max_attempts", self.max_attempts, least=1)
        if self.max_planned is not None:
            _check("max_planned", self.max_planned, least=0)
        if self.list_method not in LIST_METHODS:
            raise SpecError(
                f"list_method: expected one of {', '.join(LIST_METHODS)}, found {self.list_method!r}; correct it"
            )
        for name in ("estimate_change", "backoff_s", "max_backoff_s"):
            _check(name, getattr(self, name), least=0)
        for tenant, quota in self.quotas.items():
            _check(f"quota of tenant {tenant!r}", quota, least=1)

    def pause_s(self, num_failures: int) -> float:
        """Pause of a task after that many failures, in seconds."""
        return min(self.max_backoff_s, self.backoff_s * 2.0 ** min(num_failures - 1, 60))


def _check(name: str, value: float, *, least: int) -> None:
    if not (math.isfinite(value) and value >= least):
        raise SpecError(f"{name}: expected a number of at least {least}, found {value}; correct it")
