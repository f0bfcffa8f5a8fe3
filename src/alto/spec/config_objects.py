"""Configurations of PEFT, transformers and TRL given as Python objects; they become keys of the task."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

__all__ = ["CONFIG", "with_config_objects"]

CONFIG = "config"
"""An argument of :class:`alto.Task` that task files cannot have."""

_READER = "alto.importing.config_objects", "read_config_objects"
"""Module and function that read them. That package imports ``alto.spec``, so it is imported lazily, only when there are
such objects."""


def with_config_objects(values: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the keys of a task including those set by ``config``, and notes on settings not adopted unchanged.

    Args:
        values: Keys as the user wrote them. ``config`` is an object or a list of objects; every other key overrides it,
            and so do the fields of the search space.

    Raises:
        SpecError: An object is not a configuration of an adapter or of a trainer, or there are two of one kind.
        UnsupportedError: Settings would change what is learned, and ALTO does not have them; the message names all.
    """
    found = dict(values)
    given = found.pop(CONFIG, None)
    if given is None:
        return found, ()
    module, name = _READER
    configs = given if isinstance(given, list | tuple) else (given,)
    read: tuple[dict[str, Any], tuple[str, ...]] = getattr(import_module(module), name)(configs, found)
    return read
