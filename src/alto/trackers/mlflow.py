"""MLflow: one run for the task, and one nested run for each job."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from alto.trackers.base import JobOutcome, Point, StoredRuns, TrackedRun, plain_value

# MLflow's limits on one request.
_MAX_METRICS = 1000
_MAX_PARAMS = 100
_MAX_VALUE_CHARS = 6000


class MlflowTracker:
    """Reports to the server and experiment that MLflow's environment variables name.

    A resumed run continues the same MLflow runs; it asks the server for their last steps and skips these and earlier
    ones.
    """

    package = "mlflow"

    def start(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client: Any = MlflowClient()
        self._metric, self._param = Metric, Param
        self._run = run
        self._stored = StoredRuns(run.run_dir, "mlflow")
        self._open_jobs: dict[str, str] = {}
        self._last_steps: dict[tuple[str, str], int] = {}  # by job and metric
        parent = self._stored.id_of("run")
        if parent is None:
            self._experiment = self._experiment_id()
            parent = self._create("run", run.name, params={**run.settings, **run.fixed}, tags={})
        else:
            self._experiment = self._client.get_run(parent).info.experiment_id
            self._client.update_run(parent, status="RUNNING")
        self._parent = parent

    def log(self, job: str, points: Sequence[Point]) -> None:
        points = [point for point in points if point.step > self._stored.ended_at(job)]
        if not points:
            return
        run_id = self._open(job)
        metrics = [
            self._metric(key, value, round(1000 * point.time), point.step)
            for point in points
            for key, value in point.metrics.items()
            if point.step > self._last_steps.get((job, key), 0)
        ]
        for first in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(run_id, metrics=metrics[first : first + _MAX_METRICS])

    def end_job(self, job: str, outcome: JobOutcome) -> None:
        if outcome.step <= self._stored.ended_at(job):
            return
        run_id = self._open(job)
        if outcome.best_loss is not None:
            time_ms = round(1000 * outcome.time)
            self._client.log_metric(run_id, "eval/best_loss", outcome.best_loss, time_ms, outcome.best_step)
        self._client.set_tag(run_id, "outcome", outcome.reason)
        self._client.set_terminated(run_id, status="FAILED" if outcome.reason == "failed" else "FINISHED")
        del self._open_jobs[job]
        self._stored.set_ended(job, outcome.step)

    def finish(self, best_job: str | None) -> None:
        if best_job is not None:
            self._client.set_tag(self._parent, "best_job", best_job)
        for run_id in (*self._open_jobs.values(), self._parent):
            self._client.set_terminated(run_id, status="KILLED" if best_job is None else "FINISHED")

    def _open(self, job: str) -> str:
        """Return the MLflow run of a job, in the state RUNNING."""
        if job in self._open_jobs:
            return self._open_jobs[job]
        run_id = self._stored.id_of(job)
        if run_id is None:
            run_id = self._create(job, job, params=self._run.varying(job), tags={"mlflow.parentRunId": self._parent})
        else:
            self._client.update_run(run_id, status="RUNNING")
            for key in self._client.get_run(run_id).data.metrics:
                held = self._client.get_metric_history(run_id, key)
                self._last_steps[job, key] = max(metric.step for metric in held)
        self._open_jobs[job] = run_id
        return run_id

    def _create(self, what: str, name: str, *, params: Mapping[str, Any], tags: Mapping[str, str]) -> str:
        run_id: str = self._client.create_run(self._experiment, run_name=name, tags=dict(tags)).info.run_id
        self._stored.set_id(what, run_id)
        items = [self._param(key, str(plain_value(value))[:_MAX_VALUE_CHARS]) for key, value in params.items()]
        for first in range(0, len(items), _MAX_PARAMS):
            self._client.log_batch(run_id, params=items[first : first + _MAX_PARAMS])
        return run_id

    def _experiment_id(self) -> str:
        if (chosen := os.environ.get("MLFLOW_EXPERIMENT_ID")) is not None:
            return chosen
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "alto")
        experiment = self._client.get_experiment_by_name(name)
        created: str = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        return created
