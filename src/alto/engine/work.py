"""What the process of an executor does; named as ``module:function`` to whoever starts it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from alto.engine.runner import TaskRunner
from alto.runs import RunDir, replace_file
from alto.spec import load_task

__all__ = ["PLAN", "PLAN_ANEW", "PLAN_FILE", "TRAIN", "plan", "plan_anew", "train"]

TRAIN = "alto.engine.work:train"
PLAN = "alto.engine.work:plan"
PLAN_ANEW = "alto.engine.work:plan_anew"
PLAN_FILE = "plan.json"


def train(run_dir: str, is_interrupted: Callable[[], bool]) -> None:
    """Begin the run in ``run_dir``, or go on with it."""
    TaskRunner(is_interrupted=is_interrupted).go_on(RunDir.open(run_dir))


def plan(run_dir: str, is_interrupted: Callable[[], bool]) -> None:
    """Find out what the task in ``run_dir`` takes and write it there."""
    _plan(run_dir, is_interrupted, refresh=False)


def plan_anew(run_dir: str, is_interrupted: Callable[[], bool]) -> None:
    """The same, measured again whatever was measured before."""
    _plan(run_dir, is_interrupted, refresh=True)


def _plan(run_dir: str, is_interrupted: Callable[[], bool], *, refresh: bool) -> None:
    folder = RunDir.open(run_dir)
    found = TaskRunner(is_interrupted=is_interrupted).plan(load_task(folder.task_file), refresh=refresh)
    replace_file(Path(run_dir) / PLAN_FILE, json.dumps(asdict(found)))
