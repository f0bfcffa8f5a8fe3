"""A running attempt at a task, with the data that the controller keeps about it."""

from __future__ import annotations

from dataclasses import dataclass, field

from alto.cluster.base import Launch
from alto.runs import RunHistory

__all__ = ["RunningAttempt"]


@dataclass(slots=True, kw_only=True)
class RunningAttempt:
    """A running executor and its measured speed.

    Attributes:
        far: Progress of the run on disk when the executor was started.
        start_s: Seconds from the launch until it began to train.
        began_at: Time when it began to train; None before.
    """

    launch: Launch
    expected_s: float
    launched_at: float
    far: tuple[float, ...] = ()
    start_s: float = 0.0
    history: RunHistory = field(default_factory=RunHistory)
    began_at: float | None = None
    share_before: float = 0.0
