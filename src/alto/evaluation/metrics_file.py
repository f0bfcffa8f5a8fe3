"""``metrics.json`` beside an adapter: its measurements."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from alto.errors import RunError, RunWriteError
from alto.records import Evaluation
from alto.runs import replace_file
from alto.spec.outside import read_json

__all__ = ["add_evaluation", "check_metrics"]

_KEY = "evaluations"


def add_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """Add ``evaluation`` to the list ``evaluations`` of ``folder/metrics.json``, all else in the file left as it is.

    An older one of the same rows with the same settings is replaced.

    Raises:
        RunError: The file is there, but is not a JSON object with such a list.
        RunWriteError: It cannot be written; what was there before still is.
    """
    path = folder / "metrics.json"
    metrics = _read(path)
    entry = json.loads(json.dumps(dataclasses.asdict(evaluation), allow_nan=False))
    others = [other for other in metrics.get(_KEY, []) if _subject(other) != _subject(entry)]
    try:
        replace_file(path, json.dumps({**metrics, _KEY: [*others, entry]}, indent=2) + "\n")
    except OSError as error:
        raise RunWriteError(
            f"{path}: expected a file that can be written, found that it cannot ({error.strerror}); free space, "
            "or copy the adapter to a folder of your own"
        ) from error


def check_metrics(folder: Path) -> None:
    """Check, before anything is measured, that ``folder/metrics.json`` can be extended.

    Raises:
        RunError: It is there, but is not a JSON object with such a list.
    """
    _read(folder / "metrics.json")


def _read(path: Path) -> dict[str, Any]:
    try:
        metrics = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: expected a JSON object, found something else ({error}); move it away") from error
    if not isinstance(metrics, dict) or not isinstance(metrics.get(_KEY, []), list):
        raise RunError(f"{path}: expected a JSON object with a list {_KEY}, found something else; move it away")
    return metrics


def _subject(entry: Any) -> tuple[Any, Any] | None:
    return (entry.get("dataset"), entry.get("settings")) if isinstance(entry, dict) else None
