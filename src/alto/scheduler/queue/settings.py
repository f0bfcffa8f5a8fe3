"""The settings for planning and retries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from alto.errors import SpecError
from alto.scheduler.inter_task import LIST_METHODS

__all__ = ["MAX_ATTEMPTS_IN_ALL", "QueueSettings"]

MAX_ATTEMPTS_IN_ALL = 10
"""Limit of all attempts of a task, including attempts that lost a GPU, as a multiple of ``max_attempts``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """The settings of a queue for planning and retries.

    Attributes:
        quotas: Most GPUs that a tenant holds at a time; a tenant that is not listed has no limit.
        estimate_change: Relative change of a task's estimated duration above which a new plan is made.
        max_attempts: Number of failures after which a task is given up, at the end of the pause after its last failure.
            An attempt that lost one of its GPUs does not count, even if the loss is reported during that pause. All
            attempts together are limited to `MAX_ATTEMPTS_IN_ALL` times this number.
        backoff_s: Pause after the first failure of a task; doubled after each further failure.
        max_backoff_s: Longest pause.
        max_planned: Number of waiting and running tasks above which a plan contains only the tasks that start now,
            chosen by ``list_method``. This does not apply if waiting tasks differ in priority, because then later
            starts of higher ones must be protected. None: no limit.
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
        """Return the pause of a task after ``num_failures`` failures, in seconds."""
        return min(self.max_backoff_s, self.backoff_s * 2.0 ** min(num_failures - 1, 60))


def _check(name: str, value: float, *, least: int) -> None:
    if not (math.isfinite(value) and value >= least):
        raise SpecError(f"{name}: expected a number of at least {least}, found {value}; correct it")
