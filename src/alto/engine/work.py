"""Entry functions of executors, named ``module:function`` in launches."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from alto.engine.runner import TaskRunner
from alto.executor import Ranks
from alto.runs import RunDir, load_run_task, replace_file

__all__ = ["PLAN", "PLAN_ANEW", "PLAN_FILE", "TRAIN", "plan", "plan_anew", "train"]

TRAIN = "alto.engine.work:train"
PLAN = "alto.engine.work:plan"
PLAN_ANEW = "alto.engine.work:plan_anew"
PLAN_FILE = "plan.json"


def train(run_dir: str, is_interrupted: Callable[[], bool]) -> str:
    """Begin or resume the run in ``run_dir``; returns the notices of its result."""
    result = _runner(is_interrupted).resume(RunDir.open(run_dir), trust_remote_code=_trusts())
    return " ".join(result.notices)


def plan(run_dir: str, is_interrupted: Callable[[], bool]) -> None:
    """Measure the task in ``run_dir`` and write the measurement there."""
    _plan(run_dir, is_interrupted, refresh=False)


def plan_anew(run_dir: str, is_interrupted: Callable[[], bool]) -> None:
    """The same, measured again even where a measurement is cached."""
    _plan(run_dir, is_interrupted, refresh=True)


def _plan(run_dir: str, is_interrupted: Callable[[], bool], *, refresh: bool) -> None:
    folder = RunDir.open(run_dir)
    runner = _runner(is_interrupted)
    found = runner.plan(load_run_task(folder, trust_remote_code=_trusts()), refresh=refresh)
    if runner.ranks.is_first:
        replace_file(Path(run_dir) / PLAN_FILE, json.dumps(asdict(found)))


def _trusts() -> bool:
    """Whether the user who started this executor allows code that comes with the base model."""
    return os.environ.get("ALTO_TRUST_REMOTE_CODE") == "1"


def _runner(is_interrupted: Callable[[], bool]) -> TaskRunner:
    """A runner with the other ranks of this executor."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return TaskRunner(is_interrupted=is_interrupted, ranks=Ranks.join(device))
