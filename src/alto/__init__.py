"""ALTO tunes LoRA adapters: many configurations together on one frozen base model, the losers stopped early.

::

    engine = alto.Engine()
    result = engine.tune(alto.Task(model="alto-tiny", dataset="train.jsonl", search_space={"lr": [1e-4, 1e-3]}))
    print(result.best_job, result.adapter_dir)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from alto.errors import AltoError
from alto.records import ExitReason, JobResult, Placement, Schedule, TaskResult
from alto.spec import EarlyExit, JobConfig, Task, load_task
from alto.version import __version__

if TYPE_CHECKING:
    from alto.engine import Engine

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
    "load_task",
]


def __getattr__(name: str) -> Any:
    # The engine brings torch along, which a reader of task files does not need.
    if name == "Engine":
        return import_module("alto.engine").Engine
    raise AttributeError(f"module 'alto' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
