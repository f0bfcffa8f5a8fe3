"""Fills in settings that a task leaves open: the initial adapter's shape, PEFT's default modules, and the usual
learning rate.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from alto.backbone import (
    Backbone,
    base_differences,
    base_fingerprint,
    build_skeleton,
    limits_of,
    load_config,
    load_tokenizer,
    resolve_model,
)
from alto.data import HeadStore, is_elsewhere, preview_rows, read_task_rows
from alto.errors import DataError, ModelError, ModelNotFoundError, RunNotFoundError
from alto.evaluation import adapter_folder, usable_rows
from alto.executor import InitAdapter, model_notes
from alto.lora import adapter_base_model, default_targets, saved_settings
from alto.objectives import find_objective
from alto.records import DataPreview
from alto.spec import PEFT_DEFAULT, Axis, Task, auto_space, find_method, targeted_modules, usual_learning_rate

_TARGETS = "target_modules"


def with_start(task: Task) -> Task:
    """Return ``task`` with the resolved folder of its ``init_adapter``, and with that adapter's ranks, targets, scales
    and further tensors for keys that the task does not set; without ``init_adapter``, return it unchanged.

    Raises:
        RunNotFoundError: There is no such adapter.
        RunError: The adapter's configuration cannot be read.
        UnsupportedError: The adapter is more than plain LoRA.
        SpecError: A setting of the task conflicts with the adapter.
    """
    if task.init_adapter is None:
        return task
    try:
        folder = adapter_folder(Path(task.init_adapter).expanduser().resolve())
    except RunNotFoundError as error:
        raise RunNotFoundError(f"init_adapter: {error}") from None
    space = task.search_space
    given = {*task.fixed, *(() if space.is_auto else space.keys)}
    missing = {key: value for key, value in saved_settings(folder).items() if key not in given}
    return task.replace(**missing, init_adapter=str(folder))


def with_targets(task: Task) -> Task:
    """Return ``task`` with PEFT's default modules for its base model, and a note on them, if it asks for the default;
    return any other task unchanged.

    Raises:
        TargetModuleError: PEFT has no default modules for this base model.
        ModelError: The configuration of the base model cannot be read.
    """
    space = task.search_space
    is_fixed = _asks_for_default(task.fixed.get(_TARGETS, ()))
    if not is_fixed and not any(_has_default(axis) for group in space.groups for axis in group):
        return task
    model_type = load_config(task.base_model).model_type
    has_parameters = all(job.config.target_parameters for job in task.jobs)
    found = default_targets(model_type, has_parameters=has_parameters)
    groups = tuple(tuple(_named(axis, found) for axis in group) for group in space.groups)
    changes: dict[str, Any] = {_TARGETS: found} if is_fixed else {"search_space": replace(space, groups=groups)}
    named = found if isinstance(found, str) else ", ".join(found) or "no modules besides target_parameters"
    note = f"target_modules: {PEFT_DEFAULT} is {named}, PEFT's choice for models of the type {model_type}."
    return task.replace(**changes).with_note(note)


def with_usual_rate(task: Task, config: PretrainedConfig, *, begins: bool) -> Task:
    """Return ``task`` with the ranges of the search space ``auto``, and with the learning rate around which ``tpe``
    starts, if the task does not set it.

    Args:
        begins: Whether no job has started yet. The jobs of a resumed run keep their drawn configurations.
    """
    method, hidden_size = find_method(task.method), config.get_text_config().hidden_size
    compares_replies = method.compares_replies
    if task.search_space.is_auto:
        completions = method.settings(task.fixed).completions_per_row
        space = auto_space(hidden_size, task.fixed, compares_replies=compares_replies, completions_per_row=completions)
        task = task.replace(search_space=space)
    if task.search.algorithm != "tpe" or task.search.usual_learning_rate is not None or not begins:
        return task
    rate = usual_learning_rate(hidden_size, compares_replies=compares_replies)
    return task.replace(search=task.search.replace(usual_learning_rate=float(f"{rate:.3g}")))


def _asks_for_default(value: object) -> bool:
    return targeted_modules(value) == PEFT_DEFAULT


def _has_default(axis: Axis) -> bool:
    values = axis.values if axis.key == _TARGETS and isinstance(axis.values, tuple) else ()
    return any(_asks_for_default(value) for value in values)


def _named(axis: Axis, modules: str | tuple[str, ...]) -> Axis:
    if axis.key != _TARGETS or not isinstance(axis.values, tuple):
        return axis
    return replace(axis, values=tuple(modules if _asks_for_default(value) else value for value in axis.values))


def read_start(task: Task, backbone: Backbone) -> InitAdapter | None:
    """Return the initial adapter of the jobs of ``task``, checked against its base model; None if there is none.

    Args:
        task: Returned by :func:`with_start`.

    Raises:
        ModelError: The adapter was trained on another base model.
        TargetModuleError: The adapter does not fit the base model.
        RunNotFoundError, RunError, UnsupportedError: See :meth:`alto.executor.InitAdapter.read`.
    """
    if task.init_adapter is None:
        return None
    folder = Path(task.init_adapter)
    if not folder.is_dir():
        raise RunNotFoundError(
            f"init_adapter: expected the adapter that jobs begin with in {folder}, found no such folder; put it back, "
            "or start a new run with: alto tune"
        )
    is_reference = find_objective(task.method).needs_reference
    as_reference = f", which is also the reference of {task.method}" if is_reference else ""
    begun = f"Every job begins with the adapter in {folder}{as_reference}; step 0 evaluates this adapter."
    notes = (begun, *_base_notes(task, folder))
    return InitAdapter.read(folder, backbone, model=task.model, notes=notes)


def _base_notes(task: Task, folder: Path) -> tuple[str, ...]:
    """Return notes on doubts about whether the adapter was trained on the task's base model.

    Raises:
        ModelError: The adapter was trained on another base model.
    """
    named = adapter_base_model(folder)
    if not named:
        return (
            f"init_adapter: {folder} names no base model; it fits {task.model}, but may have been trained on a "
            "different model.",
        )
    try:
        found = resolve_model(named)
        if found == resolve_model(task.model):
            return ()
        if Path(found).is_dir():
            trained_on = base_fingerprint(replace(task.base_model, id=found))
            differences = base_differences(trained_on, base_fingerprint(task.base_model))
            if differences:
                raise ModelError(
                    f"init_adapter: expected an adapter of the base model {task.model}, found one that was trained on "
                    f"{named}, which has {', '.join(differences)}; name that model in 'model', or use another adapter"
                )
            return ()
    except ModelNotFoundError:
        pass  # the model was moved, or is on another machine
    return (
        f"init_adapter: {folder} names the base model {named}, and the task names {task.model}; whether they are "
        "the same cannot be checked.",
    )


_NUM_READ = 500
"""Number of rows of a large dataset that are read for a preview."""


def preview_task(task: Task, *, num_rows: int) -> DataPreview:
    """Return the data of ``task``, its first ``num_rows`` examples, and notes on its model. Only the first rows of a
    large dataset are read. If they cause an error, all rows are read, because the whole dataset may be valid."""
    task = with_start(task)
    try:
        shown = preview_data(task, num_rows=num_rows, head=HeadStore(max(_NUM_READ, 2 * num_rows)))
    except DataError:
        shown = preview_data(task, num_rows=num_rows)
    return with_model_notes(shown, task)


def check_visible_rows(task: Task) -> str:
    """Check the rows of ``task`` if all its datasets are files that this process sees; of large files, only the first
    rows.

    Returns:
        A notice if a dataset is not such a file; else an empty text.

    Raises:
        DataError: See :func:`alto.data.read_task_rows`.
    """
    elsewhere = next((name for name in task.dataset_names if is_elsewhere(name)), None)
    if elsewhere is not None:
        return f"{task.name}: its rows are checked when it starts, because {elsewhere} is not a file of this machine."
    try:
        read_task_rows(task, head=HeadStore(_NUM_READ))
    except DataError:
        read_task_rows(task)  # the first rows alone may cause an error
    return ""


def preview_data(task: Task, *, num_rows: int, head: HeadStore | None = None) -> DataPreview:
    """Return the data of ``task`` and its first ``num_rows`` examples.

    Args:
        head: Holds the first rows of large datasets; None tokenises all rows, which takes time.
    """
    rows = read_task_rows(task, head=head)
    if task.select_by != "metric":
        usable_rows(rows.validation, task.select_by)
    tokenizer = load_tokenizer(task.base_model)
    limits = limits_of(load_config(task.base_model))
    return preview_rows(rows, tokenizer, task, num_rows=num_rows, limits=limits, head=head)


def with_model_notes(shown: DataPreview, task: Task) -> DataPreview:
    """Return ``shown`` with notes on the settings and the model of ``task``."""
    task = with_targets(task)
    skeleton = build_skeleton(task.base_model)
    about_model = model_notes(skeleton, [job.config for job in task.jobs], task.method)
    return replace(shown, notes=(*task.notes, *shown.notes, *about_model))
