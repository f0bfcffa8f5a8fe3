"""ALTO tunes LoRA adapters: it trains many configurations together on one frozen base model and stops bad ones early.

::

    engine = alto.Engine()
    result = engine.tune(alto.Task(model="alto-tiny", dataset="train.jsonl", search_space={"lr": [1e-4, 1e-3]}))
    print(result.best_job, result.adapter_dir)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from alto.errors import AltoError
from alto.records import ExitReason, JobResult, Placement, Schedule
from alto.spec import EarlyExit, JobConfig, Task, load_task
from alto.version import __version__

if TYPE_CHECKING:
    from alto.engine import Engine
    from alto.results import TaskResult, load_run

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

_LAZY = {"Engine": "alto.engine", "TaskResult": "alto.results", "load_run": "alto.results"}


def __getattr__(name: str) -> Any:
    # Imported lazily: the engine imports torch, and results import reporting packages; reading a task needs neither.
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'alto' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
