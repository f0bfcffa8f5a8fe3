"""Metadata for the codec: how a field is written in JSON if its name and type do not define it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ALIASES", "ALWAYS", "DAMAGED_IS_NONE", "IF_ABSENT", "KEY_ALIASES", "VALUE_ALIASES", "wire"]

IF_ABSENT = "if_absent"
ALWAYS = "always"
ALIASES = "aliases"
KEY_ALIASES = "key_aliases"
VALUE_ALIASES = "value_aliases"
DAMAGED_IS_NONE = "damaged_is_none"

_UNSET = object()


def wire(
    *,
    if_absent: Any = _UNSET,
    always: bool = False,
    aliases: tuple[str, ...] = (),
    key_aliases: Mapping[str, str] | None = None,
    value_aliases: Mapping[str, str] | None = None,
    damaged_is_none: bool = False,
) -> dict[str, Any]:
    """Return the metadata of a dataclass field.

    Args:
        if_absent: JSON value used for a journal without the field. A field with neither this nor a default is required.
        always: Whether to write the field even if it has its default, which is otherwise left out.
        aliases: Names of the field in earlier versions.
        key_aliases: For a mapping: earlier names of its keys, each with the current one.
        value_aliases: For a text: earlier spellings, each with the current one.
        damaged_is_none: Whether a value of another type is read as None, not refused.
    """
    told = {
        ALWAYS: always,
        ALIASES: aliases,
        KEY_ALIASES: dict(key_aliases or {}),
        VALUE_ALIASES: dict(value_aliases or {}),
        DAMAGED_IS_NONE: damaged_is_none,
    }
    return told if if_absent is _UNSET else told | {IF_ABSENT: if_absent}
