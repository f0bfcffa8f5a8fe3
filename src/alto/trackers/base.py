"""The interface of every tracker, in terms of runs and jobs instead of any tool's own terms."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from alto.base import read_json, replace_file
from alto.errors import RunError


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The measurements of a job after one of its steps.

    Attributes:
        step: Optimizer steps done, from 1.
        time: Unix seconds.
        metrics: ``train/loss``, ``eval/loss``, ``eval/train_ema`` and the method's other metrics, under TRL's name if
            it has one (``eval/rewards/accuracies``); values may be NaN or infinite.
    """

    step: int
    time: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """The end of a job.

    Attributes:
        reason: ``completed``, or the reason for its early exit.
        step: Steps done.
        time: Unix seconds.
        best_step: Step of its best evaluation; 0 if no evaluation had a finite loss.
        best_loss: Validation loss at ``best_step``; None if there is none.
    """

    reason: str
    step: int
    time: float
    best_step: int
    best_loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The description of a run at its start.

    Attributes:
        name: Name of the run's folder.
        settings: Settings of the whole task (model, dataset, early exit, ...); nested keys are joined by dots.
        jobs: Configuration by job; a job that is added later appears here before anything else about it is reported.
    """

    name: str
    run_dir: Path
    settings: Mapping[str, Any]
    jobs: Mapping[str, Mapping[str, Any]]

    @property
    def fixed(self) -> dict[str, Any]:
        """The part of the configuration that all jobs share."""
        first, *others = self.jobs.values()
        return {key: value for key, value in first.items() if all(job.get(key) == value for job in others)}

    def varying(self, job: str) -> dict[str, Any]:
        """Return the settings of a job that differ between jobs."""
        fixed = self.fixed
        return {key: value for key, value in self.jobs[job].items() if key not in fixed}


class Tracker(Protocol):
    """An experiment tracking tool. One thread calls it, in the order of the run; after an exception it is not called
    again.

    :meth:`start` imports the tool. If a run is resumed, everything since its beginning is reported again: a tracker
    starts a new record, or continues the old record and skips what it already contains.

    Attributes:
        package: The package that :meth:`start` imports.
    """

    package: str

    def start(self, run: TrackedRun) -> None:
        """Begin a record of the run, because its task starts."""

    def log(self, job: str, points: Sequence[Point]) -> None:
        """Report the progress of a job; ``points`` are in the order of their steps."""

    def end_job(self, job: str, outcome: JobOutcome) -> None:
        """Report the end of a job. A job may be reopened, and then ends again."""

    def finish(self, best_job: str | None) -> None:
        """Report the end of the run. ``best_job`` is None if the task was interrupted or has no result."""


def plain_value(value: Any) -> str | bool | int | float:
    """Return a setting in a form that every tool accepts: text, numbers and booleans unchanged, everything else as JSON
    text."""
    if isinstance(value, str | bool | int | float):
        return value
    return json.dumps(value, sort_keys=True)


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
