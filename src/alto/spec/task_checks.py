"""Checks of several keys of a task together, and the labels of a classification head.

The values of single keys are checked by their fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import Field

from alto.base import quoted, read_json
from alto.errors import ConflictingKeysError, RunError, SpecError, UnsupportedError
from alto.records import LabelSet, ProblemType
from alto.spec.data_keys import DataKeys, label_names
from alto.spec.early_exit import EarlyExit
from alto.spec.job_config import JobConfig
from alto.spec.keys import TASK_ALIASES
from alto.spec.method import Method, find_method
from alto.spec.scoring import Scoring
from alto.spec.search import Search
from alto.spec.search_space import SearchSpace
from alto.spec.strict_yaml import MAX_VALUES, num_values
from alto.spec.validation import SpecModel, plain


def check_fixed(fixed: Mapping[str, Any], space: SearchSpace, method: Method) -> None:
    """Check the fixed fields first, so that their errors are not attributed to the first job."""
    JobConfig(**{key: value for key, value in fixed.items() if key not in method.fields})
    if not method.fields.keys() & {*space.keys}:
        method.settings(fixed)
    for key in method.fields.keys() & fixed.keys():
        method.check_setting(key, plain(fixed[key]))


def check_given_once(given: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    twice = [key for key in given["search_space"].keys if key in fixed]
    if twice:
        raise ConflictingKeysError(
            f"{twice[0]!r} is given both at the top level of the task and in search_space; expected one. Remove one."
        )
    if given.get("init_adapter") is not None and "init_lora_weights" in {*fixed, *given["search_space"].keys}:
        raise ConflictingKeysError(
            "init_lora_weights and init_adapter are both given; expected one: how new adapters start, or the saved one "
            "that jobs begin with. Remove one."
        )
    for what, do in (("validation", "validate"), ("test", "test")):
        if given.get(f"{what}_dataset") is not None and given.get(f"{what}_split") is not None:
            raise ConflictingKeysError(
                f"{what}_dataset and {what}_split are both given; expected one: the rows to {do} on, or the share of "
                "the dataset to set aside for it. Remove one."
            )
    if given.get("load_in_4bit") is True and given.get("load_in_8bit") is True:
        raise ConflictingKeysError(
            "load_in_4bit and load_in_8bit are both true; expected one: NF4, or one byte per number, which is larger "
            "and closer to the original model. Remove one."
        )


def check_splits(validation_split: float | None, test_split: float | None) -> None:
    if (validation_split or 0) + (test_split or 0) >= 1:
        raise SpecError(
            f"validation_split and test_split should leave rows to train on, found {validation_split} and "
            f"{test_split} of the dataset. Lower one of them."
        )


def check_selection(select_by: str | Scoring, method: Method) -> None:
    if select_by == "metric":
        return
    found, entry = select_by if isinstance(select_by, str) else select_by.scorer, method.entry
    remedy = f"; metric: {entry.scores[0]} chooses by that" if entry.problem_types and entry.scores else ""
    if entry.is_labelled:
        why = "validation rows have replies that the model should not give"
    elif entry.problem_types:
        why = "rows have labels and no answers"
    elif entry.is_paired:
        missing = "a final answer" if found == "eval_accuracy" else "one reply to score"
        why = f"validation rows are pairs without {missing}"
    else:
        return
    raise SpecError(
        f"select_by should be 'metric' with method {method.name!r}, whose {why}, found {found!r}. Remove the "
        f"key{remedy}."
    )


def check_samples(num_samples: int | None, method: Method) -> None:
    if num_samples and method.entry.problem_types:
        raise SpecError(
            f"num_samples should be 0 with method {method.name!r}, whose adapters predict labels and generate no text, "
            f"found {num_samples}. Remove the key."
        )


def check_rewards(
    reward_funcs: tuple[Scoring, ...], weights: tuple[float, ...] | None, method: Method, num_gpus: int
) -> None:
    if not method.entry.generates:
        if reward_funcs:
            raise SpecError(
                f"reward_funcs should come with a method that generates, found method {quoted(method.name)}. Remove "
                "the key, or set method: grpo."
            )
        return
    if not reward_funcs:
        raise SpecError(
            f"reward_funcs is missing: expected what scores the completions of method {method.name}, found nothing. "
            "Add for example reward_funcs: [numeric], or reward_funcs: [my_rewards:score]."
        )
    if weights is not None and (len(weights) != len(reward_funcs)):
        raise SpecError(
            f"reward_weights should be {len(reward_funcs)} numbers, one for each of reward_funcs, found "
            f"{quoted(list(weights))}. Correct it, or remove the key."
        )
    if num_gpus > 1:
        raise UnsupportedError(
            f"num_gpus should be 1 with method {method.name}, found {num_gpus}: completions are generated on a base "
            "model that is not sharded. Set num_gpus: 1."
        )


def check_mixture(keys: DataKeys) -> None:
    """Check that a mixture sets the keys of one dataset in its sources, not at the top level."""
    of_one = ("dataset_config", "dataset_train_split", "dataset_test_split", "columns")
    for key in of_one if keys.sources else ():
        if getattr(keys, key):
            raise SpecError(
                f"{key} should be set in the entries of 'dataset', which is a list of sources, found it at the top of "
                "the task. Move it there."
            )


def check_train_on(train_on: str, method: Method) -> None:
    entry = method.entry
    if train_on != "completion" and (method.compares_replies or entry.problem_types):
        what = "learns labels, not tokens" if entry.problem_types else "learns which replies are desirable"
        what = "compares two replies" if entry.is_paired else what
        raise SpecError(
            f"train_on should be 'completion' with method {method.name!r}, which {what}, found {train_on!r}. Remove "
            "the key."
        )


def check_state_dtype(state_dtype: str | None, config: JobConfig) -> None:
    """Check that the optimizer of a job has a state with selectable precision, if ``state_dtype`` is set."""
    if state_dtype is not None and config.optim != "adamw_torch":
        raise SpecError(
            f"optim_state_dtype should be left out with optim {config.optim!r}, whose state has its own precision, "
            f"found {state_dtype!r}. Remove it, or set optim: adamw_torch for every job."
        )


def check_scored_rungs(scoring: Scoring | None, early_exit: EarlyExit, search: Search) -> None:
    """Check that the rungs at which jobs are scored exist."""
    if scoring is None or not scoring.rungs:
        return
    if search.learns:
        raise SpecError(
            f"select_by.at should be 'finalists' with search.algorithm {search.algorithm!r}, which adds jobs that "
            f"reach a rung after the others, found {list(scoring.rungs)}. Remove 'at', or set search: random."
        )
    rungs = early_exit.selection_rungs if early_exit.enabled and early_exit.select else ()
    known_rungs = [rung.progress for rung in rungs]
    unknown = [rung for rung in scoring.rungs if not any(math.isclose(rung, at, rel_tol=1e-9) for at in known_rungs)]
    if unknown:
        known = ", ".join(f"{rung:g}" for rung in known_rungs) or "none, as no jobs are ranked"
        raise SpecError(
            f"select_by.at should be rungs of early_exit ({known}), found {unknown[0]:g}. Correct it, or set "
            "early_exit.rungs."
        )


def check_size(values: Mapping[str, Any]) -> None:
    """Check that the file written into a run's folder can be read again when the run is resumed."""
    found = num_values(values)
    if found > MAX_VALUES:
        raise SpecError(
            f"a task should hold at most {MAX_VALUES} values, found {found}. Sample them with {{min, max, num}}, or "
            f"make several tasks of it."
        )


def check_search(search: Search, space: SearchSpace, early_exit: EarlyExit) -> None:
    if search.algorithm == "grid" and space.open_ranges:
        raise SpecError(
            f"search_space.{space.open_ranges[0]} should have 'num', the number of its values in a grid. Add it, or "
            "set search: tpe."
        )
    if search.algorithm != "grid" and space.num_distinct < 2:
        raise SpecError(
            f"search.algorithm {search.algorithm!r} should have several configurations to choose from, found "
            f"{space.num_distinct}. Add values to search_space, or remove 'search'."
        )
    if search.algorithm == "pbt" and not (early_exit.enabled and early_exit.select):
        raise SpecError(
            "search.algorithm 'pbt' should rank its population, found that early_exit does not select. Remove "
            "early_exit.enabled and early_exit.select, or choose another algorithm."
        )


class Refit(SpecModel):
    """The job that is trained again, and for how long. ``alto refit`` writes it.

    Attributes:
        run: Folder of the finished run.
        job: Best job of that run; the task has its configuration.
        steps: Number of steps to train: the steps of that job's best checkpoint. The learning-rate schedule still has
            the length ``max_steps``, as if training went on to its end.
    """

    run: str = Field(min_length=1, description="folder of the finished run")
    job: str = Field(min_length=1, description="its best job")
    steps: int = Field(ge=1, le=10**9, description="number of steps to train")


def check_refit(
    refit: Refit, keys: DataKeys, early_exit: EarlyExit, select_by: str | Scoring, max_steps: list[int | None]
) -> None:
    """Check that a refit, which has no validation, has one job and no setting that needs validation."""
    if keys.sources and keys.validation_dataset is not None:
        raise UnsupportedError(
            "refit: expected validation rows that belong to the sources of the mixture, found validation_dataset: its "
            "rows belong to no source, so that no weight says how often they are drawn. Make them a source, or tune "
            "without validation_dataset."
        )
    longest = max_steps[0] if len(max_steps) == 1 else None
    if longest is None or longest < refit.steps or early_exit.enabled or select_by != "metric":
        raise SpecError(
            f"refit should come with one configuration, max_steps of at least {refit.steps}, early_exit: false and "
            f"select_by: metric, as there is no validation, found {len(max_steps)} configurations, max_steps: "
            f"{longest}, early_exit: {str(early_exit.enabled).lower()}, select_by: {select_by!s:.40}. Create "
            "such a task with: alto refit RUN"
        )


LABELS_NAME = "labels.json"
"""Name of the file beside an adapter that holds the labels of its classification head."""

_HEADS = ("score", "classifier")
"""Names of classification heads; PEFT itself adds them to ``modules_to_save``."""


def with_task_type(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace PEFT's ``task_type: SEQ_CLS`` by ``method``; any other ``task_type`` stays.

    Without a ``method``, the method becomes ``regression`` if ``problem_type`` is ``regression``, else
    ``classification``. The head is removed from ``modules_to_save``, because it is always trained and saved.
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
            "expected one of the two. Remove task_type, or set method: classification or method: regression."
        )
    saved = kept.pop("modules_to_save", None)
    names = [saved] if isinstance(saved, str) else list(saved or ())
    others = [name for name in names if name not in _HEADS]
    return kept | ({"modules_to_save": others} if others else {})


def check_label_keys(keys: DataKeys, method: Method, num_gpus: int) -> None:
    """Check the keys about labels against the method."""
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
            f"token_cache: 'disk' does not support method {method.name!r}, because the disk cache cannot store labels. "
            "Remove the key; tokens are then kept in memory."
        )
    if num_gpus > 1:
        raise UnsupportedError(
            f"num_gpus: expected 1 with method {method.name!r}, found {num_gpus}: heads are not trained on "
            "a base model that is sharded over GPUs. Set num_gpus: 1, or load_in_4bit: true for a large model."
        )
    if keys.problem_type is not None and keys.problem_type not in allowed:
        other = "regression" if keys.problem_type == "regression" else "classification"
        raise SpecError(
            f"problem_type should be {' or '.join(allowed)} with method {method.name!r}, found "
            f"{keys.problem_type!r}. Remove it, or set method: {other}."
        )
    if keys.num_labels is not None and keys.id2label is not None and keys.num_labels != len(keys.id2label):
        raise SpecError(
            f"num_labels and id2label should agree, found {keys.num_labels} and {len(keys.id2label)} names. Remove "
            "num_labels."
        )
    num_labels = keys.num_labels if keys.id2label is None else len(keys.id2label)
    if num_labels == 1 and "regression" not in allowed:
        raise SpecError(
            "num_labels should be at least 2 with method 'classification', found 1. Set method: regression for "
            "numbers, or num_labels: 2 for two classes."
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
