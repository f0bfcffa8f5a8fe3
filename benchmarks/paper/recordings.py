"""Functions of recordings for the experiments: curves of jobs that were all trained to their end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from alto.early_exit import RecordedJob, Recording

__all__ = [
    "RECORDINGS",
    "best_accuracy",
    "best_loss",
    "by_batch_size",
    "is_preference",
    "loss_at",
    "quarter_kept",
    "read_recordings",
    "spearman",
    "with_jobs",
]

RECORDINGS = Path(__file__).resolve().parents[1] / "recordings"
SMOKE_JOBS = 8


def read_recordings(scale: str) -> dict[str, Recording]:
    """Return all recordings of the repository by name; at scale ``smoke`` only their first jobs."""
    found = {path.name.removesuffix(".json.gz"): Recording.read(path) for path in sorted(RECORDINGS.glob("*.json.gz"))}
    if scale == "smoke":
        return {name: replace(recording, jobs=recording.jobs[:SMOKE_JOBS]) for name, recording in found.items()}
    return found


def with_jobs(recording: Recording, jobs: Sequence[RecordedJob]) -> Recording:
    """Return the same sweep with only some of its jobs."""
    return replace(recording, jobs=tuple(jobs))


def is_preference(recording: Recording) -> bool:
    """Return whether its jobs learn which of two replies is better."""
    return recording.jobs[0].config.get("beta") is not None


def loss_at(job: RecordedJob, share: float) -> float:
    """Return the validation loss at a share of the job's steps, interpolated between evaluations.

    Before the first evaluation it is interpolated from the loss of the frozen base. From the first loss on that is not
    finite, it is infinite.
    """
    points = [(step, loss) for step, loss in job.evaluations]
    if job.start is not None:
        points.insert(0, (0, job.start.validation_loss))
    steps, losses = np.array(points, dtype=float).T
    at = share * job.total_steps
    broken = steps[~np.isfinite(losses)]
    if broken.size and at >= broken[0]:
        return math.inf
    return float(np.interp(at, steps, losses))


def best_loss(job: RecordedJob) -> float:
    """Return the lowest validation loss that the job reached; infinite if none was finite."""
    return min((loss for _, loss in job.evaluations if math.isfinite(loss)), default=math.inf)


def best_accuracy(job: RecordedJob) -> float | None:
    """Return the highest reward accuracy on the validation pairs that the job reached, in [0, 1]; None if the recording
    has no accuracies, or no evaluation is finite."""
    return max(filter(math.isfinite, job.metrics.get("reward_accuracy", ())), default=None)


def spearman(recording: Recording, share: float) -> float:
    """Return the rank correlation of the validation losses at ``share`` of the steps with the best loss of each job.

    Equal values get the mean of their ranks; the result is NaN if all are equal.
    """
    ranks = pd.DataFrame({"now": [loss_at(job, share) for job in recording.jobs],
                          "best": [best_loss(job) for job in recording.jobs]}).rank()  # fmt: skip
    return float(ranks["now"].corr(ranks["best"]))


def quarter_kept(recording: Recording, share: float) -> tuple[float, bool]:
    """Return, if only the best quarter at ``share`` of the steps continued, the share of the final best quarter that it
    contains, and whether it contains the final winner."""
    number = math.ceil(len(recording.jobs) / 4)
    now, final = (
        sorted(range(len(recording.jobs)), key=values.__getitem__)[:number]
        for values in (
            [loss_at(job, share) for job in recording.jobs],
            [best_loss(job) for job in recording.jobs],
        )
    )
    return len(set(now) & set(final)) / number, final[0] in now


def by_batch_size(recording: Recording) -> Mapping[int, Recording]:
    """Return the parts of a sweep by ``per_device_train_batch_size``, the smallest first."""
    found: dict[int, list[RecordedJob]] = {}
    for job in recording.jobs:
        found.setdefault(int(job.config["per_device_train_batch_size"]), []).append(job)
    return {size: with_jobs(recording, found[size]) for size in sorted(found)}
