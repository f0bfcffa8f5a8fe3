"""The disk space that the states of a task's jobs need, computed before training."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from alto.executor.assembly import state_dtype_of
from alto.executor.context import TaskContext
from alto.executor.planned_job import PlannedJob
from alto.executor.profiling.measure import layout_of
from alto.lora import ADAPTER_DTYPES, bank_bytes
from alto.records import TaskPlan
from alto.spec import Task

__all__ = ["disk_bytes", "disk_notes", "free_bytes", "with_free_space"]


def disk_bytes(context: TaskContext, num_slots: int) -> int:
    """Return the largest number of bytes that the states of a task's jobs take on disk during training.

    That is the best adapter and the last state of every job, and both of every resident job once more while a
    checkpoint replaces them. Jobs that a search adds until its time or its samples are spent are not counted, because
    their number is unknown.

    Args:
        num_slots: Number of jobs that are resident at a time.
    """
    task = context.task
    sizes = sorted((_bytes_of(task, job) for job in context.jobs), reverse=True)
    search = task.search
    counted = search.max_jobs(task.search_space) if search.algorithm != "tpe" or search.budget.jobs is not None else 0
    added = max(0, counted - len(sizes))
    return sum(sizes) + added * sizes[0] + sum(sizes[:num_slots])


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk that holds ``folder``, or would hold it."""
    existing = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    return shutil.disk_usage(existing).free


def disk_notes(needed: int, free: int, folder: Path) -> tuple[str, ...]:
    """Return a note if a task may need more disk space than is free in ``folder``."""
    if needed <= free:
        return ()
    return (
        f"The adapters and states of all jobs may take {needed / 2**20:,.0f} MiB of disk space while they train, and "
        f"{free / 2**20:,.0f} MiB are free in {folder}: free some, name a folder on another disk with --output-dir, or "
        "try fewer jobs or smaller ranks. A run that fills the disk stops and can be resumed.",
    )


def with_free_space(plan: TaskPlan, output_dir: Path) -> TaskPlan:
    """Return ``plan`` with the free bytes at the place of its run, and a note if they may be too few."""
    free = free_bytes(output_dir)
    notes = disk_notes(plan.disk_bytes, free, output_dir.resolve())
    return replace(plan, disk_free_bytes=free, notes=(*plan.notes, *notes))


def _bytes_of(task: Task, job: PlannedJob) -> int:
    """Return the bytes of a job's best adapter and last state. They equal the bytes of a slot, whose gradients are as
    large as a second copy of the weights."""
    dtype, state_dtype = ADAPTER_DTYPES[task.adapter_dtype], state_dtype_of(task.optim_state_dtype)
    return bank_bytes(layout_of([job.shape]), 1, {job.config.optim}, dtype, None, state_dtype)
