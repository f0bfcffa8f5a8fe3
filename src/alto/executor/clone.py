"""Clones a job while the task runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from alto.errors import JobCommandError
from alto.executor.job_state import JobState
from alto.spec import Job, Task
from alto.spec.job_config import JOB_FIELDS
from alto.spec.keys import JOB_ALIASES, canonical_keys
from alto.spec.method import find_method

__all__ = ["clone_job", "describe_changes", "next_id"]


def clone_job(origin: Job, changes: Mapping[str, Any], others: Collection[JobState], *, warm: bool, task: Task) -> Job:
    """Return a new job with the configuration of ``origin`` and ``changes`` to it.

    ``lora_alpha`` keeps its ratio to ``r`` unless it is given. A given number of epochs replaces ``max_steps``.

    Args:
        origin: The job to clone.
        changes: New values by key, in any spelling of a job's keys and of the settings of the task's method.
        others: All jobs of the task.
        warm: Whether the clone starts from the weights of ``origin``; then it may have the configuration of another
            job.
        task: The task of these jobs.

    Raises:
        JobCommandError: Another job already has this configuration.
        SpecError: A change is not valid.
    """
    of = find_method(task.method)
    fields, aliases = (*JOB_FIELDS, *of.known_keys), {**JOB_ALIASES, **of.aliases}
    changes = canonical_keys(changes, fields=fields, aliases=aliases, where="the clone")
    values = origin.config.to_dict()
    if isinstance(changes.get("r"), int) and "lora_alpha" not in changes:
        values["lora_alpha"] *= changes["r"] / values["r"]
    if "num_train_epochs" in changes:
        values["max_steps"] = None
    values |= changes
    config = task.job_config(values)
    twin = next((job.id for job in others if job.config == config), None)
    if twin is not None and not warm:
        raise JobCommandError(
            f"expected a configuration that no other job has, found that {twin} has it; change a setting, or start "
            "from the job's weights"
        )
    return Job(id=next_id(job.id for job in others), config=config)


def describe_changes(origin: Job, clone: Job) -> str:
    """Return the settings that differ between the two jobs, as text."""
    before, after = origin.config.to_dict(), clone.config.to_dict()
    return ", ".join(f"{key}={after[key]}" for key in after if after[key] != before[key]) or "nothing changed"


def next_id(ids: Iterable[str]) -> str:
    """Return the id for a job that is added to the jobs with ``ids``."""
    numbers = [job.removeprefix("job-") for job in ids]
    return f"job-{max(map(int, numbers)) + 1:0{max(map(len, numbers))}d}"
