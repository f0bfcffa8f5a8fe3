"""An attempt at a task while it runs, as the controller follows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from alto.cluster.base import Launch
from alto.errors import RunError
from alto.runs import NOT_FOLDABLE, RunDir, RunHistory, read_intact_entries

__all__ = ["RunningAttempt", "history_before"]


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


def history_before(run_dir: str, seq: int) -> RunHistory:
    """The state of a run after its first ``seq`` entries; an empty state where its journal cannot be read."""
    try:
        return RunHistory.of(read_intact_entries(RunDir(Path(run_dir)).journal_file)[: max(0, seq)])
    except (RunError, *NOT_FOLDABLE):
        return RunHistory()
