"""An attempt at a task while it runs, as the controller follows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from alto.cluster.base import Launch
from alto.runs import RunHistory

__all__ = ["RunningAttempt"]


@dataclass(slots=True, kw_only=True)
class RunningAttempt:
    """A running executor and its measured pace.

    Attributes:
        far: Progress of the run on disk when it was started.
        start_s: Seconds until it began to train.
        began_at: When it began to train; None before.
    """

    launch: Launch
    expected_s: float
    launched_at: float
    far: tuple[float, ...] = ()
    start_s: float = 0.0
    history: RunHistory = field(default_factory=RunHistory)
    began_at: float | None = None
    share_before: float = 0.0
