"""What an executor leaves beside its run: logs, a heartbeat, and how it ended.

::

    logs/attempt-<n>/
        stdout.log, stderr.log    what it and its libraries print
        rank-<k>.log              what its ranks beside the first print
        heartbeat                 touched while it works; there from the moment it has the run to itself
        ended.json                how it ended; a process that was killed leaves none
        ended-rank-<k>.json       how a rank beside the first ended, where that ended the executor
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from alto.cluster.base import Outcome
from alto.runs import replace_file, writing

__all__ = ["AttemptDir", "Ending"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an executor says that it ended.

    Attributes:
        reason: In a sentence; empty where it finished.
        error: Class of the error, empty where there was none.
    """

    outcome: Outcome
    reason: str = ""
    error: str = ""


class AttemptDir:
    """The folder of one attempt at a run; no two attempts share one, whatever their numbers."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stdout = root / "stdout.log"
        self.stderr = root / "stderr.log"
        self.heartbeat = root / "heartbeat"

    @classmethod
    def create(cls, run_dir: Path, attempt: int) -> AttemptDir:
        """A new folder in ``run_dir``.

        Raises:
            RunWriteError: It cannot be made.
        """
        logs = run_dir / "logs"
        with writing(run_dir, logs):
            logs.mkdir(exist_ok=True)
            root, again = logs / f"attempt-{attempt}", 1
            # A controller that was started anew may count from where it was.
            while root.exists():
                again += 1
                root = logs / f"attempt-{attempt}-{again}"
            root.mkdir()
        return cls(root)

    @property
    def run_dir(self) -> Path:
        return self.root.parents[1]

    def rank_log(self, rank: int) -> Path:
        """What a rank beside the first prints."""
        return self.root / f"rank-{rank}.log"

    def tell_ending(self, ending: Ending, rank: int = 0) -> None:
        """Say how it ended, all at once; the first rank says it for the executor."""
        file = self._ended(rank)
        with writing(self.run_dir, file):
            replace_file(file, json.dumps(asdict(ending)) + "\n")

    def ending(self, rank: int = 0) -> Ending | None:
        """What was said; None where nothing was."""
        try:
            said = json.loads(self._ended(rank).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return Ending(outcome=Outcome(said["outcome"]), reason=said["reason"], error=said["error"])

    def _ended(self, rank: int) -> Path:
        return self.root / (f"ended-rank-{rank}.json" if rank else "ended.json")
