"""What a run's own files may not decide: whether Python code is run that comes with somebody's model.

The task file that a user submits is the user's own statement. A run directory may be a colleague's, or have been
downloaded; there the permission comes from whoever works on it, anew each time.
"""

from __future__ import annotations

from alto.errors import UntrustedCodeError
from alto.runs.run_dir import RunDir
from alto.spec import Task, read_run_task

__all__ = ["load_run_task"]


def load_run_task(run: RunDir, *, trust_remote_code: bool) -> Task:
    """The task of a run whose base model is about to be loaded.

    Args:
        trust_remote_code: The caller's permission to run the Python code that comes with the base model. It allows what
            the task asks for; it does not ask for it.

    Raises:
        UntrustedCodeError: The task asks for that, and the caller has not allowed it.
        SpecError: The task cannot be read.
    """
    task = read_run_task(run.task_file)
    if task.trust_remote_code and not trust_remote_code:
        raise UntrustedCodeError(
            f"trust_remote_code: expected permission from you to run the Python code of the base model {task.model!r}, "
            f"found it only in {run.task_file}, which may be somebody else's; that code would run with all your "
            "rights: read it, then add --trust-remote-code (in Python: trust_remote_code=True)"
        )
    return task
