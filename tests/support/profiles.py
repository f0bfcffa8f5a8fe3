"""Measurements of a device with 1,000 MiB, for tests that need a profile and do not want to wait for one."""

from __future__ import annotations

import pytest

from alto.executor.profiling import profile
from alto.executor.profiling.measure import Measured
from alto.records import MemoryPoint, ThroughputPoint
from alto.spec import Task

MIB = 2**20
MEASURED = Measured(
    memory=(
        MemoryPoint(num_jobs=1, num_tokens=100, peak_bytes=110 * MIB),
        MemoryPoint(num_jobs=2, num_tokens=1000, peak_bytes=200 * MIB),
    ),
    durations=(
        ThroughputPoint(num_jobs=1, num_tokens=100, duration_s=0.1),
        ThroughputPoint(num_jobs=2, num_tokens=1000, duration_s=0.5),
    ),
    eval_token_s=1e-4,
    capacity_bytes=1000 * MIB,
    duration_s=3.0,
)


def measured_at_once(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """Make every measurement find `MEASURED`; return the tasks that were measured."""
    tasks: list[Task] = []

    def take(task: Task, lengths: object, **ignored: object) -> Measured:
        tasks.append(task)
        return MEASURED

    monkeypatch.setattr(profile, "_measured_in_child", take)
    return tasks
