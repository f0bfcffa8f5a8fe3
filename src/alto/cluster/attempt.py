"""The files of one executor in its run directory: logs, a heartbeat, and how it ended.

::

    logs/attempt-<n>/
        stdout.log, stderr.log    output of the executor and its libraries
        rank-<k>.log              output of each rank after the first
        heartbeat                 touched while it works; exists once it holds the run's lock
        ended.json                how it ended; missing if the process was killed
        ended-rank-<k>.json       how a rank after the first ended, if that ended the executor
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from alto.base import read_json, replace_file, writing
from alto.cluster.base import Outcome
from alto.errors import DiskFullError

_UNWRITTEN = {Outcome.FINISHED: 80, Outcome.INTERRUPTED: 81, Outcome.FAILED: 82, Outcome.LOST: 83}
_DISK_FULL = 84
"""Exit codes of an executor that could not write how it ended. No interpreter or shell uses these codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an executor ended.

    Attributes:
        reason: A sentence; if it finished, notices for the user, usually empty.
        error: Class of the error; empty if there was none.
    """

    outcome: Outcome
    reason: str = ""
    error: str = ""


def exit_code_of(ending: Ending, *, is_written: bool) -> int:
    """Return the exit code of an executor's process; it encodes the end if ``ended.json`` could not be written."""
    if is_written:
        return int(ending.outcome not in (Outcome.FINISHED, Outcome.INTERRUPTED))
    return _DISK_FULL if ending.error == DiskFullError.__name__ else _UNWRITTEN[ending.outcome]


def unwritten_ending(exit_code: int, attempt: AttemptDir, rank: int = 0) -> Ending | None:
    """Return the end that the exit code of an executor, or of one of its ranks, encodes; None if it encodes none.

    Args:
        attempt: The attempt, for messages.
    """
    unwritten = f"could not write down how it ended: the disk of {attempt.run_dir} is full or cannot be written"
    if exit_code == _DISK_FULL:
        return Ending(outcome=Outcome.FAILED, reason=f"it {unwritten}; free disk space", error=DiskFullError.__name__)
    outcome = next((outcome for outcome, code in _UNWRITTEN.items() if code == exit_code), None)
    if outcome is None:
        return None
    said = attempt.last_words(rank)
    return Ending(outcome=outcome, reason=f"it {unwritten}" + (f"; its log ends with: {said}" if said else ""))


class AttemptDir:
    """The folder of one attempt at a run; no two attempts share a folder, even with equal numbers."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stdout = root / "stdout.log"
        self.stderr = root / "stderr.log"
        self.heartbeat = root / "heartbeat"

    @classmethod
    def create(cls, run_dir: Path, attempt: int) -> AttemptDir:
        """Make a new folder in ``run_dir``.

        Raises:
            RunWriteError: The folder cannot be made.
        """
        logs = run_dir / "logs"
        with writing(run_dir, logs):
            logs.mkdir(exist_ok=True)
            root, again = logs / f"attempt-{attempt}", 1
            # A restarted controller may count from the same number again.
            while root.exists():
                again += 1
                root = logs / f"attempt-{attempt}-{again}"
            root.mkdir()
        return cls(root)

    @property
    def run_dir(self) -> Path:
        return self.root.parents[1]

    def rank_log(self, rank: int) -> Path:
        """Return the path of the log of a rank after the first."""
        return self.root / f"rank-{rank}.log"

    def last_words(self, rank: int = 0) -> str:
        """Return the last line of a rank's log; empty if there is none."""
        log = self.rank_log(rank) if rank else self.stderr
        try:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def write_ending(self, ending: Ending, rank: int = 0) -> None:
        """Write how it ended, atomically; the first rank writes it for the executor."""
        file = self._ended(rank)
        with writing(self.run_dir, file):
            replace_file(file, json.dumps(asdict(ending)) + "\n")

    def ending(self, rank: int = 0) -> Ending | None:
        """Return how it ended, as written; None if nothing valid was written."""
        try:
            said = read_json(self._ended(rank))
            return Ending(outcome=Outcome(said["outcome"]), reason=f"{said['reason']}", error=f"{said['error']}")
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def _ended(self, rank: int) -> Path:
        return self.root / (f"ended-rank-{rank}.json" if rank else "ended.json")
