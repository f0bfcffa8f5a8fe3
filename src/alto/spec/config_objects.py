"""Configurations of PEFT, transformers and TRL that a user gives as Python objects: they become keys of the task."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

__all__ = ["CONFIG", "with_config_objects"]

CONFIG = "config"
"""The argument of :class:`alto.Task` that no task file has."""

_READER = "alto.importing.config_objects", "read_config_objects"
"""Module and function that read them. The package knows the keys of other tools and is made of tasks, so it is an entry
point here, which is loaded where there are such objects."""


def with_config_objects(values: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The keys of a task with those that its ``config`` sets, and notes on what is not taken over as it is.

    Args:
        values: As the user wrote them. ``config`` is an object or a list of them; every other key overrules it, and so
            do the fields of the search space.

    Raises:
        SpecError: There are other objects than configurations of one adapter and of one trainer.
        UnsupportedError: A setting would change what is learned, and ALTO does not have it; all of them are named.
    """
    found = dict(values)
    given = found.pop(CONFIG, None)
    if given is None:
        return found, ()
    module, name = _READER
    configs = given if isinstance(given, list | tuple) else (given,)
    read: tuple[dict[str, Any], tuple[str, ...]] = getattr(import_module(module), name)(configs, found)
    return read
