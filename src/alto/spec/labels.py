"""Labels of a task that trains classification heads: checks of its keys, and the file of label names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from alto.base import quoted, read_json
from alto.errors import ConflictingKeysError, RunError, SpecError, UnsupportedError
from alto.records import LabelSet, ProblemType
from alto.spec.data_keys import DataKeys, label_names
from alto.spec.keys import TASK_ALIASES
from alto.spec.method import Method, find_method

LABELS_NAME = "labels.json"
"""Name of the file beside an adapter that holds the labels of its classification head."""

_HEADS = ("score", "classifier")
"""Names of classification heads; PEFT itself adds them to ``modules_to_save``."""


def with_task_type(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace PEFT's ``task_type: SEQ_CLS`` by ``method``; any other ``task_type`` stays.

    Without a ``method``, it becomes ``regression`` if ``problem_type`` is that, else ``classification``. The head is
    removed from ``modules_to_save``, because it is always trained and saved.

    Raises:
        ConflictingKeysError: The given method trains no classification head.
    """
    task_type = values.get("task_type")
    if not isinstance(task_type, str) or task_type.upper() != "SEQ_CLS":
        return dict(values)
    kept = {key: value for key, value in values.items() if key != "task_type"}
    named = next((kept[key] for key in kept if TASK_ALIASES.get(key, key) == "method"), None)
    if named is None:
        kept["method"] = "regression" if kept.get("problem_type") == "regression" else "classification"
    elif isinstance(named, str) and not find_method(named).entry.problem_types:
        raise ConflictingKeysError(
            f"task_type {quoted(task_type)} trains a classification head, and method {quoted(named)} does not; "
            "expected one of the two. Remove task_type, or write method: classification or method: regression."
        )
    saved = kept.pop("modules_to_save", None)
    names = [saved] if isinstance(saved, str) else list(saved or ())
    others = [name for name in names if name not in _HEADS]
    return kept | ({"modules_to_save": others} if others else {})


def check_label_keys(keys: DataKeys, method: Method, num_gpus: int) -> None:
    """Check the keys about labels against the method.

    Raises:
        SpecError: The method has no labels, or labels of another kind; or the keys contradict each other.
        UnsupportedError: The method trains classification heads, with several GPUs or with ``token_cache: disk``.
    """
    allowed = method.entry.problem_types
    if (keys.dataset_format == "text_classification") != bool(allowed) and keys.dataset_format != "auto":
        expected = "auto or text_classification" if allowed else "another form"
        raise SpecError(
            f"dataset_format should be {expected} with method {method.name!r}, found {keys.dataset_format!r}. Remove "
            "the key, or change the method."
        )
    for key in ("problem_type", "num_labels", "id2label"):
        if not allowed and getattr(keys, key) is not None:
            raise SpecError(
                f"{key} belongs to method classification or regression, found it with method {method.name!r}. Remove "
                "the key, or change the method."
            )
    if not allowed:
        return
    if keys.token_cache == "disk":
        raise UnsupportedError(
            f"token_cache: expected 'auto' or 'memory' with method {method.name!r}, found 'disk', which cannot store "
            "the labels of texts. Remove the key: the tokens are kept in memory."
        )
    if num_gpus > 1:
        raise UnsupportedError(
            f"num_gpus: expected 1 with method {method.name!r}, found {num_gpus}: heads are not trained on "
            "a base model that is sharded over GPUs. Write num_gpus: 1, or load_in_4bit: true for a large model."
        )
    if keys.problem_type is not None and keys.problem_type not in allowed:
        other = "regression" if keys.problem_type == "regression" else "classification"
        raise SpecError(
            f"problem_type should be {' or '.join(allowed)} with method {method.name!r}, found "
            f"{keys.problem_type!r}. Remove it, or write method: {other}."
        )
    if keys.num_labels is not None and keys.id2label is not None and keys.num_labels != len(keys.id2label):
        raise SpecError(
            f"num_labels and id2label should agree, found {keys.num_labels} and {len(keys.id2label)} names. Remove "
            "num_labels."
        )
    num_labels = keys.num_labels if keys.id2label is None else len(keys.id2label)
    if num_labels == 1 and "regression" not in allowed:
        raise SpecError(
            "num_labels should be at least 2 with method 'classification', found 1. Write method: regression for "
            "numbers, or 2 for two classes."
        )


def labels_beside(adapter: Path) -> LabelSet | None:
    """Read the labels of the classification head in the folder ``adapter``; None if there is no such file.

    Raises:
        RunError: The file is damaged.
    """
    file = adapter / LABELS_NAME
    if not file.is_file():
        return None
    try:
        described = read_json(file)
        if described["problem_type"] not in get_args(ProblemType):
            raise ValueError(f"problem_type {quoted(described['problem_type'])}")
        return LabelSet(problem_type=described["problem_type"], names=label_names(described["id2label"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{file}: expected problem_type and id2label of a classification head, found: {type(error).__name__} "
            f"({error}); export the adapter again"
        ) from error
