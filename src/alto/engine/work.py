"""What the process of an executor does; named as ``module:function`` to whoever starts it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from alto.engine.runner import TaskRunner
from alto.runs import RunDir, replace_file
from alto.spec import load_task

__all__ = ["PLAN", "PLAN_FILE", "TRAIN", "plan", "train"]

TRAIN = "alto.engine.work:train"
PLAN = "alto.engine.work:plan"
PLAN_FILE = "plan.json"


def train(run_dir: str, is_interrupted: Callable[[], bool]) -> None:
    """Begin the run in ``run_dir``, or go on with it."""
    TaskRunner(is_interrupted=is_interrupted).go_on(RunDir.open(run_dir))


def plan(run_dir: str, is_interrupted: Callable[[], bool]) -> None:
    """Find out what the task in ``run_dir`` takes and write it there."""
    folder = RunDir.open(run_dir)
    found = TaskRunner(is_interrupted=is_interrupted).plan(load_task(folder.task_file))
    replace_file(Path(run_dir) / PLAN_FILE, json.dumps(asdict(found)))
