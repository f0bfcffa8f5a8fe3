"""What the ranks of an executor do in the tests of their deaths: train, and die as the task's folder says."""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from alto.backbone import Backbone
from alto.engine import work
from alto.executor import executor
from alto.executor.checkpoint import StateStore

DEATHS_FILE = "deaths.json"
"""In the folder above the run: for each attempt, ``[rank, instant, signal, which]``, or null for one that lives."""


def train(run_dir: str, is_interrupted: Callable[[], bool]) -> None:
    """The real thing, with a checkpoint at every turn, until this rank's death."""
    executor.MAX_SAVING_SHARE = 1e9
    deaths = json.loads((Path(run_dir).parent / DEATHS_FILE).read_text("utf-8"))
    death = deaths[len(list((Path(run_dir) / "logs").iterdir())) - 1]
    if death is not None and death[0] == int(os.environ["RANK"]):
        _, instant, number, which = death
        match instant:
            case "forward":
                _die_at(Backbone, "hidden_states", number, which)
            case "backward":
                _die_at(Tensor, "backward", number, which)
            case "saved":  # and another rank perhaps not
                _die_at(StateStore, "save", number, which, is_done=True)
    work.train(run_dir, is_interrupted)


def _die_at(owner: type, name: str, number: int, which: int, *, is_done: bool = False) -> None:
    """At one of the calls of a method, before it or when it is done."""
    method = getattr(owner, name)
    left = iter(range(which - 1))

    @functools.wraps(method)
    def dies(*args: Any, **kwargs: Any) -> Any:
        is_now = next(left, None) is None
        result = method(*args, **kwargs) if is_done or not is_now else None
        if is_now:
            os.kill(os.getpid(), signal.Signals(number))
        return result

    setattr(owner, name, dies)
