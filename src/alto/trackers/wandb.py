"""Weights & Biases: one run for each job, in a group for the task."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from typing import Any

from alto.trackers.base import JobOutcome, Point, StoredRuns, TrackedRun, plain_value

_SETTINGS: dict[str, Any] = {
    # When the process exits, W&B waits for pending uploads, by default without a limit.
    "init_timeout": 20.0,
    "finish_timeout": 10.0,
    # The terminal is used by the live table, and the machine's load belongs to no single job.
    "silent": True,
    "console": "off",
    "x_disable_stats": True,
}


class WandbTracker:
    """Reports to the project and in the mode that W&B's environment variables name.

    A resumed run continues the same W&B runs, which accept only steps after their last one. An offline run cannot be
    continued, so each start writes a new, complete one.
    """

    package = "wandb"

    def start(self, run: TrackedRun) -> None:
        import wandb

        settings = wandb.setup(wandb.Settings(**_SETTINGS)).settings
        if settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise RuntimeError(
                "expected a login at W&B, found none; use 'wandb login', or set WANDB_API_KEY or WANDB_MODE=offline"
            )
        self._wandb: Any = wandb
        self._run = run
        self._stored = StoredRuns(run.run_dir, "wandb")
        self._open_jobs: dict[str, Any] = {}

    def log(self, job: str, points: Sequence[Point]) -> None:
        points = [point for point in points if point.step > self._stored.ended_at(job)]
        if not points:
            return
        wandb_run = self._open(job)
        for point in points:
            if point.step >= wandb_run.starting_step:
                wandb_run.log(dict(point.metrics), step=point.step)

    def end_job(self, job: str, outcome: JobOutcome) -> None:
        if outcome.step <= self._stored.ended_at(job):
            return
        wandb_run = self._open(job)
        wandb_run.summary["outcome"] = outcome.reason
        wandb_run.summary["best_step"] = outcome.best_step
        if outcome.best_loss is not None:
            wandb_run.summary["eval/best_loss"] = outcome.best_loss
        self._open_jobs.pop(job).finish(exit_code=1 if outcome.reason == "failed" else 0)
        if not wandb_run.offline:
            self._stored.set_ended(job, outcome.step)

    def finish(self, best_job: str | None) -> None:
        for wandb_run in self._open_jobs.values():
            wandb_run.finish(exit_code=1 if best_job is None else 0)

    def _open(self, job: str) -> Any:
        """Return the open W&B run of a job; start or continue it if it is not open."""
        if job in self._open_jobs:
            return self._open_jobs[job]
        config = {**self._run.settings, **self._run.jobs[job]}
        wandb_run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "alto"),
            group=self._run.name,
            name=job,
            # Always give an id: otherwise WANDB_RUN_ID in the environment would merge all jobs into one run.
            id=self._stored.id_of(job) or uuid.uuid4().hex[:12],
            resume="allow",
            config={key: plain_value(value) for key, value in config.items()},
            dir=os.environ.get("WANDB_DIR", self._run.run_dir),
            reinit="create_new",
            settings=self._wandb.Settings(**_SETTINGS),
        )
        if not wandb_run.offline:
            self._stored.set_id(job, wandb_run.id)
        self._open_jobs[job] = wandb_run
        return wandb_run
