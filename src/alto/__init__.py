"""ALTO tunes LoRA adapters: it trains many configurations together on one frozen base model and stops bad ones early.

::

    engine = alto.Engine()
    result = engine.tune(alto.Task(model="alto-tiny", dataset="train.jsonl", search_space={"lr": [1e-4, 1e-3]}))
    print(result.best_job, result.adapter_dir)
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from alto.errors import AltoError
from alto.version import __version__

if TYPE_CHECKING:
    from alto.engine import Engine
    from alto.records import ExitReason, JobResult, Placement, Schedule
    from alto.results import TaskResult, load_run
    from alto.spec import EarlyExit, JobConfig, Task, load_task

__all__ = [
    "AltoError",
    "EarlyExit",
    "Engine",
    "ExitReason",
    "JobConfig",
    "JobResult",
    "Placement",
    "Schedule",
    "Task",
    "TaskResult",
    "__version__",
    "load_run",
    "load_task",
]

# OpenMP's threads wait for each other by spinning, by default for so long that on a busy machine they take the cores
# from the threads they wait for, and a step takes ten times as long. torch reads this when it is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

_HOMES = {
    **dict.fromkeys(("ExitReason", "JobResult", "Placement", "Schedule"), "alto.records"),
    **dict.fromkeys(("EarlyExit", "JobConfig", "Task", "load_task"), "alto.spec"),
    **dict.fromkeys(("TaskResult", "load_run"), "alto.results"),
    "Engine": "alto.engine",
}
"""The package of every name that is imported when it is first used: the engine imports torch, for instance."""


def __getattr__(name: str) -> Any:
    if name in ("records", "spec"):
        return import_module(f"alto.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'alto' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
