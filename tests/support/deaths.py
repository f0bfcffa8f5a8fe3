"""Executors in the tests of kills: they train, and die or wait at an instant that a test has chosen."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

import alto
from alto.backbone import Backbone
from alto.cluster import HostedRun
from alto.engine import work
from alto.executor import Trainer, session
from alto.executor.checkpoint import StateStore

__all__ = ["HOLD", "TRAIN", "Death", "Training", "plan_deaths"]

TRAIN = "deaths:Training"
"""The host of executors."""

HOLD = 0
"""Value in place of a signal: wait there until the executor is asked to stop, or is killed. Nothing has to be done in
time."""

Death = tuple[int, str, int, int]
"""Death of an executor, ``rank, instant, signal, which``: at the which-th time, from 1, that this rank reaches the
instant."""

_FILE = "deaths.json"

_INSTANTS: Mapping[str, tuple[type, str, bool]] = {
    "forward": (Backbone, "hidden_states", False),
    "backward": (Tensor, "backward", False),
    "update": (Trainer, "update", False),
    "saved": (StateStore, "save", True),  # another rank may not have saved
}
"""A method, and whether the instant is after it instead of before it."""


def plan_deaths(folder: Path, deaths: Mapping[str, Sequence[Death]]) -> None:
    """Set the deaths of the first attempts of each task below ``folder``, by name; all other attempts live.

    The name ``*`` stands for all tasks that are not named.
    """
    (folder / _FILE).write_text(json.dumps(deaths), encoding="utf-8")


class Training(work.Training):
    """The host of real executors, with a checkpoint at every turn, until this rank's death."""

    def __init__(self) -> None:
        super().__init__()
        self.is_usable = False  # instants change the whole process

    def attach(self, run: HostedRun) -> None:
        session.MAX_SAVING_FRACTION = 1e9
        death = _death_of(Path(run.ticket.run_dir))
        if death is not None and death[0] == int(os.environ["RANK"]):
            _, instant, number, which = death
            _die_at(instant, which, functools.partial(_hold, run.is_interrupted) if number == HOLD else _kill(number))
        super().attach(run)


def _death_of(run_dir: Path) -> Death | None:
    """Return the death of the attempt that begins now."""
    file = next(folder / _FILE for folder in run_dir.parents if (folder / _FILE).exists())
    planned = json.loads(file.read_text("utf-8"))
    deaths = planned.get(alto.load_task(run_dir / "task.yaml").name, planned.get("*", []))
    attempt = len(list((run_dir / "logs").iterdir()))
    return deaths[attempt - 1] if attempt <= len(deaths) else None


def _kill(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), signal.Signals(number))


def _hold(is_interrupted: Callable[[], bool]) -> None:
    while not is_interrupted():
        time.sleep(0.01)


def _die_at(instant: str, which: int, die: Callable[[], None]) -> None:
    owner, name, is_after = _INSTANTS[instant]
    method = getattr(owner, name)
    num_calls = 0

    @functools.wraps(method)
    def dies(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == which and not is_after:
            die()
        result = method(*args, **kwargs)
        if num_calls == which and is_after:
            die()
        return result

    setattr(owner, name, dies)
