"""What a tool calls the runs it keeps for us, in ``<run>/trackers/<tool>.json``, for when our run is resumed."""

from __future__ import annotations

import json
from pathlib import Path

from alto.runs import replace_file

__all__ = ["StoredRuns"]


class StoredRuns:
    """Ids that one tool gave, and the jobs whose record with it is complete.

    Args:
        run_dir: Folder of our run.
        tool: Name of the tool.
    """

    def __init__(self, run_dir: Path, tool: str) -> None:
        self._file = run_dir / "trackers" / f"{tool}.json"
        self._file.parent.mkdir(exist_ok=True)
        stored = json.loads(self._file.read_text(encoding="utf-8")) if self._file.exists() else {}
        self._ids: dict[str, str] = stored.get("ids", {})
        self._ended_at: dict[str, int] = stored.get("ended_at", {})

    def id_of(self, what: str) -> str | None:
        """The tool's id of ``what``, a job or ``run``; None where it has given none."""
        return self._ids.get(what)

    def set_id(self, what: str, tool_id: str) -> None:
        """Keep an id."""
        self._ids[what] = tool_id
        self._write()

    def ended_at(self, job: str) -> int:
        """Steps of a job whose record was complete when it ended, 0 if it has not ended."""
        return self._ended_at.get(job, 0)

    def set_ended(self, job: str, step: int) -> None:
        """Keep that the record of a job is complete up to ``step``."""
        self._ended_at[job] = step
        self._write()

    def _write(self) -> None:
        replace_file(self._file, json.dumps({"ids": self._ids, "ended_at": self._ended_at}, indent=2) + "\n")
