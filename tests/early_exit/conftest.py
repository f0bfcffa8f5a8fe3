"""Builders of loss records. They have session scope, so that hypothesis may use them in every example."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from alto.early_exit import RecordedJob, Recording, evaluation_steps
from alto.records import LossPoint, Rung

History = Callable[..., list[LossPoint]]


@pytest.fixture(scope="session")
def history() -> History:
    """``history(validation, train=None, steps=None)``: one job's evaluations, ten steps apart by default."""

    def build(
        validation: Sequence[float], train: Sequence[float] | None = None, steps: Sequence[int] | None = None
    ) -> list[LossPoint]:
        steps = steps or [10 * (index + 1) for index in range(len(validation))]
        return [
            LossPoint(job="a", step=step, total_steps=1000, train_ema=ema, validation_loss=loss)
            for step, ema, loss in zip(steps, train or validation, validation, strict=True)
        ]

    return build


RUNGS = (Rung(progress=0.025, keep=0.5), Rung(progress=0.05, keep=0.2))


@pytest.fixture(scope="session")
def record() -> Callable[..., Recording]:
    """``record({job: (train, validation)}, ...)``: losses as functions of progress in (0, 1]; twenty evaluations."""

    def build(
        curves: dict[str, tuple[Callable[[float], float], Callable[[float], float]]],
        *,
        num_train: int = 100,
        batch_size: int = 2,
        total_steps: int = 200,
    ) -> Recording:
        jobs = []
        for job, (train, validation) in curves.items():
            losses = [train(step / total_steps) for step in range(1, total_steps + 1)]
            broken = next((step for step, loss in enumerate(losses, start=1) if not math.isfinite(loss)), total_steps)
            due = evaluation_steps(total_steps, 0.05, RUNGS)
            evaluations = [(step, validation(step / total_steps)) for step in due if step <= broken]
            jobs.append(
                RecordedJob(
                    job=job,
                    config={"per_device_train_batch_size": batch_size},
                    total_steps=total_steps,
                    rows_per_step=batch_size,
                    train_losses=tuple(losses[:broken]),
                    evaluations=tuple(evaluations),
                )
            )
        return Recording(task={"name": "made up"}, num_train=num_train, jobs=tuple(jobs))

    return build
