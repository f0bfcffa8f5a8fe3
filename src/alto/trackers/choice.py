"""Chooses the trackers that a task reports to."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from alto.errors import UnsupportedError
from alto.spec import Task
from alto.trackers.base import Tracker
from alto.trackers.mlflow import MlflowTracker
from alto.trackers.tensorboard import TensorBoardTracker
from alto.trackers.trackio import TrackioTracker
from alto.trackers.wandb import WandbTracker

_TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "mlflow": MlflowTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
}


def chosen_trackers(task: Task) -> dict[str, Tracker]:
    """Return a new tracker for each tool that ``task.report_to`` names; no tool is imported yet.

    Raises:
        UnsupportedError: A named tool is not installed.
    """
    return {name: _TRACKERS[name]() for name in _names(task.report_to)}


def _names(report_to: str | Sequence[str]) -> Sequence[str]:
    match report_to:
        case "none":
            return ()
        case "auto":
            return [name for name in ("tensorboard",) if _is_installed(_TRACKERS[name].package)]
        case "all":
            return [name for name in _TRACKERS if _is_installed(_TRACKERS[name].package)]
    for name in report_to:
        package = _TRACKERS[name].package
        if not _is_installed(package):
            raise UnsupportedError(
                f"report_to: expected trackers that are installed, found {name!r}, which is not installed. Install it "
                f"with: pip install {package}; or remove it from report_to."
            )
    return report_to


def _is_installed(package: str) -> bool:
    # find_spec also finds a folder of that name in the working directory (wandb leaves one), but it has no origin.
    spec = find_spec(package)
    return spec is not None and spec.origin is not None
