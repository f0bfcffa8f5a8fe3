"""The task that trains the winner of a finished run again, on all rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alto.errors import ModelNotFoundError, UnsupportedError
from alto.runs import JobHistory, QueueDir, RunDir, load_run_task, read_history, task_outcome
from alto.spec import Task
from alto.spec.base_objects import BaseObjects
from alto.spec.job_config import JOB_FIELDS
from alto.spec.method import find_method

__all__ = ["refit_folder", "refit_task"]

_MAX_NAME_CHARS = 100
_SUFFIX = "-refit"

_OF_A_SEARCH = (
    *("search", "search_space", "early_exit", "select_by", "num_finalists", "repeat_by", "metric", "name"),
    "refit",
)
"""Keys of a task that compare its jobs, and the task's name; a refit does not copy them."""


def refit_task(run_dir: RunDir, *, trust_remote_code: bool, objects: BaseObjects | None = None) -> Task:
    """Return the task of a refit of the finished run in ``run_dir``; see :meth:`alto.Engine.refit`.

    Args:
        trust_remote_code: Whether the caller allows code of the base model if the run's task asks for it.
        objects: The base model, if it is given as an object; None loads the one that the run names.

    Raises:
        NoResultError: The run has no result.
        UntrustedCodeError: The task asks for code of the base model, and the caller does not allow it.
        ModelNotFoundError: The run's base model has no name to load it by, and no object is given.
        UnsupportedError: The winner was not trained with one configuration from its beginning, or is a refit.
        SpecError, UnsupportedError: See :class:`alto.Task`.
    """
    history = read_history(run_dir.root)
    outcome = task_outcome(history, run_dir)
    winner = history.jobs[outcome.best_job]
    _check(winner, refit_of=outcome.refit_of)
    task = load_run_task(run_dir, trust_remote_code=trust_remote_code, is_trained=False)
    if objects is None and not task.base_model.is_loadable:
        raise ModelNotFoundError(
            f"refit: expected the base model of {run_dir.root} as an object, found none: {task.model} was given to "
            "alto.Task in the process of that run, and no name loads the same model; give it again: "
            "engine.refit(RUN, model=…, tokenizer=…)"
        )
    of_jobs = {*JOB_FIELDS, *find_method(task.method).fields}
    kept = {key: value for key, value in task.to_dict().items() if key not in (*of_jobs, *_OF_A_SEARCH)}
    found = Task(
        **kept,
        **_configuration(winner, task),
        name=task.name[: _MAX_NAME_CHARS - len(_SUFFIX)] + _SUFFIX,
        early_exit=False,
        refit={"run": str(run_dir.root), "job": winner.job, "steps": winner.best_step},
    )
    return found if objects is None else found.replace(model=objects)


def refit_folder(run_dir: RunDir) -> Path:
    """Return the folder for the new run: the run's parent folder, or the parent of its queue's folder."""
    queue = run_dir.root.parents[1]
    return queue.parent if QueueDir.exists(queue) else run_dir.root.parent


def _configuration(winner: JobHistory, task: Task) -> dict[str, Any]:
    """Return the winner's settings, including the length of its learning-rate schedule."""
    values = {**task.job_config(winner.config).to_dict(), "max_steps": winner.total_steps}
    if task.init_adapter is not None:
        del values["init_lora_weights"]  # has no effect with an initial adapter, and Task refuses it
    if not task.sources:
        values.pop("mixture_weights", None)
    return values


def _check(winner: JobHistory, *, refit_of: str) -> None:
    """Raise UnsupportedError if the winner cannot be trained again from its configuration alone."""
    if refit_of:
        found = f"a run that is itself a refit of {refit_of} and has trained all rows; refit the original run"
    elif winner.forked_at:
        found = (
            f"{winner.job}, which continued {winner.origin} from step {winner.forked_at} with different settings "
            "(search: pbt); train the settings of your choice from the start, with: alto tune"
        )
    elif winner.starts_warm:
        found = (
            f"{winner.job}, which began with the best weights of {winner.origin}; clone it without --warm, or train on "
            "with init_adapter"
        )
    else:
        return
    raise UnsupportedError(f"refit: expected a winner with one configuration from its beginning, found {found}")
