"""Tasks whose base model is an object in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from alto.backbone import borrowed, find_named_base, object_fingerprint
from alto.base import quoted
from alto.errors import SpecError, UnsupportedError
from alto.spec import BaseObjects, Task, with_base_objects

IN_A_QUEUE = "a queue, whose tasks run in separate processes"


@contextlib.contextmanager
def borrowing(task: Task, device: torch.device, *, is_named: bool = True) -> Iterator[Task]:
    """Yield a task to be trained inside the block. Afterwards, even after an error, a base model that is an object is
    restored to its earlier state.

    If a name loads the same model and tokenizer, the yielded task has that name, so that any process can resume the
    run. Otherwise the task records that its base model was an object, with a fingerprint of the weights.

    Args:
        task: Its model may be an object.
        is_named: Whether to look for a name; false for a run that was started on an object without one.

    Raises:
        AltoError: See :func:`alto.backbone.borrowed`.
    """
    if task.objects is None:
        yield task
        return
    with borrowed(task.objects, device):
        yield _identified(task, is_named=is_named)


def _identified(task: Task, *, is_named: bool) -> Task:
    objects = task.objects
    assert objects is not None
    named = find_named_base(objects) if is_named else None
    if named is None:
        return task.replace(model=replace(objects, fingerprint=object_fingerprint(objects.model)))
    changes: dict[str, Any] = {"model": replace(objects, name=named.model), "dtype": named.dtype}
    if named.chat_template is not None and task.chat_template is None:
        changes["chat_template"] = named.chat_template
    return task.replace(**changes)


def check_has_id(tasks: Iterable[Task], where: str) -> None:
    """Raise UnsupportedError if a task's base model is an object, which other processes cannot load by name.

    Args:
        where: The feature that needs a name, for the message.
    """
    for task in tasks:
        if task.objects is not None:
            raise UnsupportedError(
                f"model: expected the id of a model, or a folder, for {where}, found {task.objects.name} for "
                f"{task.name!r}, which exists only in this process; train with engine.tune on one GPU, or save model "
                "and tokenizer to a folder with save_pretrained, and name the folder"
            )


def given_objects(model: object, tokenizer: object) -> BaseObjects | None:
    """Return the base model with which a run is resumed; None if it is to be loaded by name.

    Raises:
        SpecError: One of the two is missing, or the model is not an object.
    """
    if model is None and tokenizer is None:
        return None
    _, objects = with_base_objects({"model": model, "tokenizer": tokenizer})
    if objects is None:
        raise SpecError(
            f"model should be the loaded model that the run began with, found {quoted(model)}. Give the object and its "
            "tokenizer, or neither of them, so that the run loads its model by name."
        )
    return objects
