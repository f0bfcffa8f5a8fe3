"""Reuses the packing of an earlier run for another run of the same task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alto.errors import RunError, SpecError
from alto.runs import RunDir, read_intact_events
from alto.runs.events import TaskStarted, decode
from alto.spec import BaseModelSpec, Task, read_run_task
from alto.spec.base_model import quantisation_keys

__all__ = ["packed_as"]

_SAME_KEYS = (
    "dataset",
    "validation_dataset",
    "test_dataset",
    "test_split",
    "method",
    "max_length",
    "train_on",
    "chat_template",
    "num_gpus",
    "adapter_dtype",
    "optim_state_dtype",
)
_PACKING = ("max_slots", "max_tokens_per_step", "max_tokens_per_pass", "gradient_checkpointing")
_UNLIMITED_TOKENS = 2**24
"""The largest allowed value, more than any step has. It means "no limit", so that no limit needs to be measured."""


def packed_as(task: Task, run: str | Path, device_name: str, num_ranks: int) -> Task:
    """Return ``task`` with every packing limit set as in ``run``.

    The jobs that share a forward pass determine the order in which sums are rounded, so two runs of a task are bitwise
    equal only if they are packed alike.

    Args:
        task: A task with absolute paths, from :func:`alto.engine.runner.portable`.
        run: The directory of a run of the same task.
        device_name: Device on which ``task`` will be trained.
        num_ranks: Number of processes that will train it.

    Raises:
        RunNotFoundError: ``run`` is not a run directory.
        RunError: It is a run of another model, dataset or jobs, on another device or with another number of processes;
            or its journal has no packing, or a damaged one.
    """
    run_dir = RunDir.open(run)
    started = _started(run_dir)
    if started is None or started.packing is None:
        raise RunError(
            f"packing_from: expected a run whose journal has its packing, found {run_dir.root} without one; name a run "
            "of this version of ALTO that has begun to train, or set max_slots, max_tokens_per_step, "
            "max_tokens_per_pass and gradient_checkpointing in the task"
        )
    earlier = read_run_task(run_dir.task_file)
    packing, before = started.packing, _precision(earlier.base_model)
    for key, wanted in _precision(task.base_model).items():
        _check_same(run_dir, key, wanted, before[key])
    for key in _SAME_KEYS:
        _check_same(run_dir, key, getattr(task, key), getattr(earlier, key))
    _check_same_jobs(run_dir, task, earlier)
    _check_same(run_dir, "device", device_name, packing.get("device"))
    _check_same(run_dir, "number of processes", num_ranks, started.num_ranks)
    try:
        limits = {key: packing[key] for key in _PACKING}
        limits["max_tokens_per_step"] = limits["max_tokens_per_step"] or _UNLIMITED_TOKENS
        if None in limits.values():
            raise KeyError(next(key for key in _PACKING if limits[key] is None))
        return task.replace(**limits)
    except (KeyError, SpecError) as error:
        raise RunError(
            f"packing_from: expected the packing of {run_dir.root} as ALTO writes it into a journal, found invalid "
            f"content ({error!s:.200}); name a different run of the task"
        ) from error


def _started(run_dir: RunDir) -> TaskStarted | None:
    """Return the first event of a run; None if it has none or it cannot be read."""
    lines = read_intact_events(run_dir.journal_file)[:1]
    try:
        events = [decode(line).event for line in lines]
    except RunError:
        return None
    return next((event for event in events if isinstance(event, TaskStarted)), None)


def _precision(base: BaseModelSpec) -> dict[str, Any]:
    """Return the task keys that define base model and precision; keys on how it is read or compiled may differ."""
    return {"model": base.id, "dtype": base.dtype, **quantisation_keys(base.quantisation)}


def _check_same_jobs(run_dir: RunDir, task: Task, earlier: Task) -> None:
    wanted, found = ({job.id: job.config for job in each.jobs} for each in (task, earlier))
    other = next((job for job in [*wanted, *found] if wanted.get(job) != found.get(job)), None)
    if other is not None:
        raise RunError(
            f"packing_from: expected a run with the jobs of this task, found {run_dir.root} with a different {other}, "
            "which changes the rounding of jobs in the same micro-batch; name a run of the same task"
        )


def _check_same(run_dir: RunDir, key: str, wanted: Any, found: Any) -> None:
    if wanted != found:
        raise RunError(
            f"packing_from: expected a run with {key} {wanted!r}, as this task has, found {run_dir.root} with "
            f"{found!r}; name a run of the same task on the same kind of device"
        )
