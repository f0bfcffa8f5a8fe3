"""The files of one attempt in its run directory: logs, a heartbeat, and how it ended.

::

    logs/attempt-<n>/
        stdout.log, stderr.log    output of the executor and its libraries
        rank-<k>.log              output of each rank after the first
        heartbeat                 touched while it works; exists once it holds the run's lock
        ended.json                how it ended; missing if the process was killed
        ended-rank-<k>.json       how a rank after the first ended, if that ended the attempt
"""

from __future__ import annotations

import json
import signal
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter

from alto.base import replace_file, writing
from alto.cluster.base import Ending, Outcome
from alto.errors import DiskFullError, RunWriteError

_UNWRITTEN = {Outcome.FINISHED: 80, Outcome.INTERRUPTED: 81, Outcome.FAILED: 82, Outcome.LOST: 83}
_DISK_FULL = 84
"""Exit codes of an executor that could not write how it ended. No interpreter or shell uses these codes."""

_ENDING = TypeAdapter(Ending)


def exit_code_of(ending: Ending, *, is_written: bool) -> int:
    """Return the exit code of an executor's process; it encodes the end if ``ended.json`` could not be written."""
    if is_written:
        return int(ending.outcome not in (Outcome.FINISHED, Outcome.INTERRUPTED))
    return _DISK_FULL if ending.error == DiskFullError.__name__ else _UNWRITTEN[ending.outcome]


def ending_of_exit(exit_code: int, attempt: AttemptDir | None, rank: int = 0, *, killed_because: str = "") -> Ending:
    """Return how an attempt, or one of its ranks, ended that has not reported it.

    Args:
        exit_code: Exit code of its process; negative for a signal.
        attempt: The attempt; None if the process worked on several.
    """
    outcomes = {code: outcome for outcome, code in _UNWRITTEN.items()} | {_DISK_FULL: Outcome.FAILED}
    if attempt is None or exit_code not in outcomes:
        how = (
            f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"
        )
        where = f"; see {attempt.rank_log(rank)}" if attempt is not None else ""
        who = f"rank {rank}" if rank else "its process"
        return Ending(outcome=Outcome.LOST, reason=killed_because or f"{who} {how} and reported no reason{where}")
    reason = f"it could not write down how it ended: the disk of {attempt.run_dir} is full or cannot be written"
    if exit_code == _DISK_FULL:
        return Ending(outcome=Outcome.FAILED, reason=f"{reason}; free disk space", error=DiskFullError.__name__)
    last_line = attempt.last_log_line(rank)
    reason += f"; its log ends with: {last_line}" if last_line else ""
    if outcomes[exit_code] is Outcome.FINISHED:
        return Ending(outcome=Outcome.FINISHED, notices=(reason,))
    return Ending(outcome=outcomes[exit_code], reason=reason)


def read_ending(path: Path) -> Ending | None:
    """Return how an attempt ended, from a JSON file with the fields of `Ending`; None if it has no valid ones."""
    try:
        return _ENDING.validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None


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
        """Return the path of the log of a rank."""
        return self.root / f"rank-{rank}.log" if rank else self.stderr

    def last_log_line(self, rank: int = 0) -> str:
        """Return the last line of a rank's log; empty if there is none."""
        try:
            lines = self.rank_log(rank).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def write_ending(self, ending: Ending, rank: int = 0) -> bool:
        """Write how it ended, atomically; the first rank writes it for all. Return whether that was possible."""
        file = self._ended(rank)
        try:
            with writing(self.run_dir, file):
                replace_file(file, json.dumps(asdict(ending)) + "\n")
        except RunWriteError:
            return False
        return True

    def ending(self, rank: int = 0) -> Ending | None:
        """Return how it ended, as written; None if nothing valid was written."""
        return read_ending(self._ended(rank))

    def _ended(self, rank: int) -> Path:
        return self.root / (f"ended-rank-{rank}.json" if rank else "ended.json")
