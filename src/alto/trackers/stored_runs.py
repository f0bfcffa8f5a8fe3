"""The ids of a tool's own runs in ``<run>/trackers/<tool>.json``, kept for a resumed run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from alto.errors import RunError
from alto.runs import replace_file
from alto.spec.outside import read_json

__all__ = ["StoredRuns"]


class StoredRuns:
    """The run ids of one tool, and the jobs whose record in the tool is complete."""

    def __init__(self, run_dir: Path, tool: str) -> None:
        self._file = run_dir / "trackers" / f"{tool}.json"
        self._file.parent.mkdir(exist_ok=True)
        stored = _read(self._file)
        self._ids: dict[str, str] = stored.get("ids", {})
        self._ended_at: dict[str, int] = stored.get("ended_at", {})

    def id_of(self, what: str) -> str | None:
        """Return the tool's id of ``what``, a job or ``run``; None if there is none yet."""
        return self._ids.get(what)

    def set_id(self, what: str, tool_id: str) -> None:
        self._ids[what] = tool_id
        self._write()

    def ended_at(self, job: str) -> int:
        """Return the step at which a job ended with a complete record; 0 if it has not ended."""
        return self._ended_at.get(job, 0)

    def set_ended(self, job: str, step: int) -> None:
        """Save that the record of a job is complete up to ``step``."""
        self._ended_at[job] = step
        self._write()

    def _write(self) -> None:
        replace_file(self._file, json.dumps({"ids": self._ids, "ended_at": self._ended_at}, indent=2) + "\n")


def _read(file: Path) -> dict[str, Any]:
    try:
        stored = read_json(file)
        ids, ended_at = stored.get("ids", {}), stored.get("ended_at", {})
        if not all(isinstance(value, str) for value in ids.values()):
            raise TypeError("an id that is not text")
        if not all(type(value) is int for value in ended_at.values()):
            raise TypeError("a step that is not a number")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise RunError(
            f"{file}: expected the ids that a tracker gave this run, found invalid content ({error!s:.200}); remove "
            "the file, and the tracker starts a new run"
        ) from error
    return {"ids": ids, "ended_at": ended_at}
