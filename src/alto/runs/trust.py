"""Keeps the files of a run from deciding whether foreign Python code is run, or where rows are sent.

A task file that a user submits is the user's own decision. A run directory may belong to a colleague, or may have been
downloaded. So the user who works on a run must give the permission each time.
"""

from __future__ import annotations

from alto.errors import UntrustedCodeError
from alto.runs.run_dir import RunDir
from alto.spec import Task, read_run_task

__all__ = ["load_run_task"]


def load_run_task(run: RunDir, *, trust_remote_code: bool, is_trained: bool = True) -> Task:
    """Return the task of a run whose base model is about to be loaded.

    Args:
        trust_remote_code: The caller's permission to run the Python code that comes with the base model. The code runs
            only if the task's own key is set too. The permission also covers a scorer that runs code or sends rows to a
            server.
        is_trained: Whether the run will be trained, so that its scorer may be used.

    Raises:
        UntrustedCodeError: The task sets the key, or has such a scorer, and the caller has not allowed it.
        SpecError: The task cannot be read.
    """
    task = read_run_task(run.task_file)
    if task.trust_remote_code and not trust_remote_code:
        raise UntrustedCodeError(
            f"trust_remote_code: expected permission from you to run the Python code of the base model {task.model!r}, "
            f"found it only in {run.task_file}, which may come from another person; that code would run with all your "
            "rights: read it, then add --trust-remote-code (in Python: trust_remote_code=True)"
        )
    scoring = task.scoring
    if is_trained and scoring is not None and scoring.reaches_outside and not trust_remote_code:
        what = f"call the Python function {scoring.function}" if scoring.function else f"send rows to {scoring.address}"
        raise UntrustedCodeError(
            f"select_by: expected permission from you to {what}, found it only in {run.task_file}, which may come from "
            "another person; if you trust it, add --trust-remote-code (in Python: trust_remote_code=True)"
        )
    return task
