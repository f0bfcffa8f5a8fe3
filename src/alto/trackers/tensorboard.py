"""TensorBoard: event files in ``<run>/tensorboard/<job>/``, so that the curves of all jobs appear in one chart."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

from alto.trackers.base import JobOutcome, Point, TrackedRun, plain_value


class TensorBoardTracker:
    """Writes its folder from scratch, even if a run is resumed.

    The event file of a job is opened and closed for each write, because there may be thousands of jobs. torch's
    ``SummaryWriter`` keeps a thread and an open file for every job, and loses its buffered events when the process is
    killed.
    """

    package = "tensorboard"

    def start(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        self._event, self._record_writer = Event, RecordWriter
        self._summary: Any = summary
        self._run = run
        self._folder = run.run_dir / "tensorboard"
        if self._folder.exists():
            shutil.rmtree(self._folder)

    def log(self, job: str, points: Sequence[Point]) -> None:
        events = [
            self._event(step=point.step, wall_time=point.time, summary=self._summary.scalar(tag, value))
            for point in points
            for tag, value in point.metrics.items()
        ]
        self._append(job, events, time=points[0].time)

    def end_job(self, job: str, outcome: JobOutcome) -> None:
        summaries = [self._summary.text("outcome", outcome.reason)]
        if outcome.best_loss is not None:
            summaries.append(self._summary.scalar("eval/best_loss", outcome.best_loss))
        facts = {"step": outcome.step, "wall_time": outcome.time}
        self._append(job, [self._event(summary=summary, **facts) for summary in summaries], time=outcome.time)

    def finish(self, best_job: str | None) -> None:
        """Do nothing: everything is already written."""

    def _append(self, job: str, events: Sequence[Any], *, time: float) -> None:
        path = self._folder / job / "events.out.tfevents.alto"
        is_new = not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            writer = self._record_writer(file)
            for event in [*(self._head(job, time) if is_new else ()), *events]:
                writer.write(event.SerializeToString())

    def _head(self, job: str, time: float) -> list[Any]:
        """Return the first events of a job's file: the version of its format, and the job's hyperparameters."""
        values = {key: plain_value(value) for key, value in self._run.varying(job).items()}
        metrics = {"eval/loss": 0, "eval/best_loss": 0}
        parts = self._summary.hparams(values, metrics) if values else ()
        return [
            self._event(wall_time=time, file_version="brain.Event:2"),
            *(self._event(wall_time=time, summary=part) for part in parts),
        ]
