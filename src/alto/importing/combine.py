"""Combination of several configurations into one task: equal values are fixed, different ones form a paired search
space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from alto.errors import SpecError
from alto.spec.job_config import JobConfig
from alto.spec.method import Method, find_method
from alto.spec.quoting import quoted
from alto.spec.search_space import written
from alto.spec.task import TASK_FIELDS

__all__ = ["combined"]


def combined(configurations: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the keys of one task that has a job for each of ``configurations``.

    Args:
        configurations: Task keys of each file, by the file's name.

    Raises:
        SpecError: They differ in a key that must be the same for all jobs of a task, or do not differ at all.
    """
    names, given = list(configurations), list(configurations.values())
    if len(given) == 1:
        return dict(given[0])
    keys = list(dict.fromkeys(key for values in given for key in values))
    apart = [key for key in keys if key in TASK_FIELDS and not _is_same([values.get(key) for values in given])]
    if apart:
        found = "; ".join(f"{key} {', '.join(quoted(values.get(key)) for values in given)}" for key in apart)
        raise SpecError(
            f"{', '.join(names)}: expected configurations of one task, with the same model, dataset and "
            f"other keys that apply to all jobs, found {found}. Import them one by one."
        )
    method = find_method(given[0].get("method", "sft"))
    varied = {}
    for key in keys:
        if key in TASK_FIELDS:
            continue
        column = [values[key] if key in values else _default(key, method) for values in given]
        if not _is_same(column):
            varied[key] = column
    if not varied:
        raise SpecError(f"{', '.join(names)}: expected different configurations, found equal ones. Import one of them.")
    fixed = {key: value for key, value in given[0].items() if key not in varied}
    shared = {key: values[key] for values in given for key in values if key not in varied and key not in fixed}
    space: dict[str, Any] = dict(varied) if len(varied) == 1 else {"paired": varied}
    return {**fixed, **shared, "search_space": space}


def _is_same(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


def _default(key: str, method: Method) -> Any:
    """Return the default of a job's field, as it is written in a task file."""
    if key == "lora_alpha":
        return "2*r"
    field = method.fields[key] if key in method.fields else JobConfig.model_fields[key]
    return written(key, field.default)
