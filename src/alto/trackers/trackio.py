"""Logs to Trackio: one run per job; the runs of a task form one group."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Sequence
from typing import Any

from alto.trackers.base import JobOutcome, Point, StoredRuns, TrackedRun, plain_value


class TrackioTracker:
    """Reports to the place that Trackio's environment variables name; by default, this machine.

    Trackio accepts any step at any time and would store repeated steps twice, so a resumed run makes new, complete runs
    in a separate group.
    """

    package = "trackio"

    def start(self, run: TrackedRun) -> None:
        import trackio
        import trackio.run

        # Trackio prints a message for every run on standard output, where the command may print JSON.
        for module in (trackio, trackio.run, trackio.utils):
            vars(module)["print"] = _print_nothing
        self._trackio: Any = trackio
        self._run = run
        stored = StoredRuns(run.run_dir, "trackio")
        num_starts = int(stored.id_of("start") or 0)
        stored.set_id("start", str(num_starts + 1))
        self._group = f"{run.name}-resumed-{num_starts}" if num_starts else run.name
        self._open_jobs: dict[str, Any] = {}

    def log(self, job: str, points: Sequence[Point]) -> None:
        trackio_run = self._open(job)
        for point in points:
            trackio_run.log(dict(point.metrics), step=point.step)

    def end_job(self, job: str, outcome: JobOutcome) -> None:
        facts: dict[str, Any] = {"outcome": outcome.reason}
        if outcome.best_loss is not None:
            facts["eval/best_loss"] = outcome.best_loss
        trackio_run = self._open(job)
        trackio_run.log(facts, step=outcome.step)
        trackio_run.finish()
        del self._open_jobs[job]

    def finish(self, best_job: str | None) -> None:
        for trackio_run in self._open_jobs.values():
            trackio_run.finish()

    def _open(self, job: str) -> Any:
        """Return the open Trackio run of a job; start it if there is none."""
        if job not in self._open_jobs:
            config = {**self._run.settings, **self._run.jobs[job]}
            # Trackio has one current run per context and finishes it when the next starts, but jobs run side by side.
            self._open_jobs[job] = contextvars.Context().run(
                self._trackio.init,
                project=os.environ.get("TRACKIO_PROJECT", "alto"),
                name=f"{self._group}-{job}",
                group=self._group,
                resume="allow",
                config={key: plain_value(value) for key, value in config.items()},
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        return self._open_jobs[job]


def _print_nothing(*_: object, **__: object) -> None:
    """Do nothing; a replacement for ``print``."""
