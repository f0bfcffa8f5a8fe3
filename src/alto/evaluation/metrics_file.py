"""``metrics.json`` in an adapter's folder, which holds its evaluations."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from alto.base import read_json, replace_file
from alto.errors import RunError, RunWriteError
from alto.records import Evaluation
from alto.runs import METRICS_NAME

_KEY = "evaluations"


def add_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """Add ``evaluation`` to the list ``evaluations`` in ``folder/metrics.json``; the rest of the file is unchanged.

    An earlier evaluation on the same rows with the same settings is replaced.

    Raises:
        RunError: The file exists, but is not a JSON object with such a list.
        RunWriteError: The file cannot be written; it is unchanged.
    """
    path = folder / METRICS_NAME
    metrics = _read(path)
    entry = json.loads(json.dumps(dataclasses.asdict(evaluation), allow_nan=False))
    others = [other for other in metrics.get(_KEY, []) if _subject(other) != _subject(entry)]
    try:
        replace_file(path, json.dumps({**metrics, _KEY: [*others, entry]}, indent=2) + "\n")
    except OSError as error:
        raise RunWriteError(
            f"{path}: expected a writable file, found that writing fails ({error.strerror}); free disk space, "
            "or copy the adapter to a folder where you can write"
        ) from error


def check_metrics(folder: Path) -> None:
    """Check, before anything is measured, that an evaluation can be added to ``folder/metrics.json``.

    Raises:
        RunError: The file exists, but is not a JSON object with a list ``evaluations``.
    """
    _read(folder / METRICS_NAME)


def _read(path: Path) -> dict[str, Any]:
    try:
        metrics = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path}: expected a JSON object, found invalid content ({error}); move the file away"
        ) from error
    if not isinstance(metrics, dict) or not isinstance(metrics.get(_KEY, []), list):
        raise RunError(f"{path}: expected a JSON object with a list {_KEY}, found invalid content; move the file away")
    return metrics


def _subject(entry: Any) -> tuple[Any, Any] | None:
    return (entry.get("dataset"), entry.get("settings")) if isinstance(entry, dict) else None
