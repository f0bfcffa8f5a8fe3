"""The method of a task: its objective, and the settings of a job that belong to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from alto.base import quoted
from alto.errors import SpecError, UnknownKeyError
from alto.spec.keys import JOB_ALIASES, TASK_ALIASES, canonical_keys
from alto.spec.objective_settings import (
    CPO_LOSS_TYPES,
    GRPO_LOSS_TYPES,
    KTO_LOSS_TYPES,
    LOSS_TYPES,
    OBJECTIVES,
    ObjectiveEntry,
    ObjectiveSettings,
)

OWN_METHODS = tuple(OBJECTIVES.own)
"""Names of ALTO's own methods."""

_FORMS: Mapping[str, tuple[str, ...]] = {
    "dpo": LOSS_TYPES,
    "cpo": CPO_LOSS_TYPES,
    "kto": KTO_LOSS_TYPES,
    "grpo": GRPO_LOSS_TYPES,
}
"""The loss types of each method; users sometimes give them as the method."""


_OWN_SETTINGS: Mapping[str, type[ObjectiveSettings]] = {
    name: entry.settings for name, entry in OBJECTIVES.own.items() if isinstance(entry, ObjectiveEntry)
}

_METHODS_WITH: Mapping[str, tuple[str, ...]] = {
    key: tuple(name for name, settings in _OWN_SETTINGS.items() if key in settings.model_fields)
    for kind in _OWN_SETTINGS.values()
    for key in kind.model_fields
}
"""The ALTO methods that have each setting."""

SETTING_ALIASES: Mapping[str, str] = {
    alias: key for settings in _OWN_SETTINGS.values() for alias, key in settings.aliases.items()
}
"""Other spellings of the settings of ALTO's own methods."""


_SAME_AS_NONE: Mapping[tuple[str, str], tuple[str, ...]] = {("sft", "loss_type"): ("nll", "chunked_nll")}
"""TRL's values for what the method does anyway, by method and by a setting that only other methods have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method of a task: its name and the entry of its objective."""

    name: str
    entry: ObjectiveEntry

    @property
    def fields(self) -> Mapping[str, FieldInfo]:
        """The method's settings by name."""
        return self.entry.settings.model_fields

    @property
    def known_keys(self) -> tuple[str, ...]:
        """Names of the method's settings, then those of other ALTO methods, which :meth:`without_others` refuses."""
        return tuple(dict.fromkeys((*self.fields, *_METHODS_WITH)))

    @property
    def aliases(self) -> Mapping[str, str]:
        """Other spellings of :attr:`known_keys`."""
        return {**SETTING_ALIASES, **self.entry.settings.aliases}

    @property
    def spellings(self) -> Mapping[str, str]:
        """Other spellings of all keys of a task: its own, those of its jobs, and :attr:`known_keys`."""
        return {**JOB_ALIASES, **TASK_ALIASES, **self.aliases}

    @property
    def compares_replies(self) -> bool:
        """Whether the method learns which replies are better, from pairs or from labelled replies."""
        return bool(self.entry.is_paired) or self.entry.is_labelled

    def canonical(self, given: Mapping[Any, Any], fields: Iterable[str], where: str) -> dict[str, Any]:
        """Return ``given``, which may have ``fields`` and settings of the method, under canonical names and without
        settings of other methods."""
        known = (*fields, *self.known_keys)
        return self.without_others(canonical_keys(given, fields=known, aliases=self.spellings, where=where))

    def without_others(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``given`` without settings of other methods, which must be null or have no effect."""
        kept: dict[str, Any] = {}
        refused = []
        for key, value in given.items():
            having = _METHODS_WITH.get(key, ())
            if key in self.fields or not having:
                kept[key] = value
            elif value is not None and value != [None] and value not in _SAME_AS_NONE.get((self.name, key), ()):
                listed = " and ".join(part for part in (", ".join(having[:-1]), having[-1]) if part)
                refused.append(
                    f"{key!r} is a setting of method {listed}, found with method {self.name!r}. Remove "
                    "the key, or change the method."
                )
        if refused:
            raise UnknownKeyError("\n".join(refused))
        return kept

    def settings(self, values: Mapping[str, Any]) -> ObjectiveSettings:
        """Return the method's settings among ``values`` (canonical names), with defaults filled in."""
        return self.entry.settings(**{key: values[key] for key in self.fields if key in values})

    def check_setting(self, key: str, value: object) -> None:
        """Check that the setting ``key`` may have ``value``, independent of other settings."""
        error = None if value is None else self.entry.settings.error_of(key, value)
        if error is not None:
            raise error


_GENERATES = "which ALTO does not have. Choose one of these methods; grpo also learns from rewards."
_SWEEP = "which is how a sweep of W&B searches. Put its parameters under 'search_space', and set 'search: "
_OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("rloo", "ppo", "online_dpo"), _GENERATES),
    "grid": f"{_SWEEP}grid'.",
    "random": f"{_SWEEP}random'.",
    "bayes": f"{_SWEEP}tpe'.",
}
"""Values of ``method`` in other programs, each with the end of an error message: what it is, and what to do."""


def find_method(name: str) -> Method:
    """Return the method called ``name``.

    Raises:
        SpecError: There is no such method.
        UnsupportedError: The entry that a package registers cannot be used.
    """
    method = None if name in OBJECTIVES.own else next((of for of, forms in _FORMS.items() if name in forms), None)
    if method is not None and name not in OBJECTIVES.names():
        raise SpecError(
            f"method should be one of {', '.join(OBJECTIVES.names())}, found {quoted(name)}. Set method: {method} "
            f"and loss_type: {name}."
        )
    if name in _OTHER_NAMES and name not in OBJECTIVES.names():
        raise SpecError(
            f"method should be one of {', '.join(OBJECTIVES.names())}, found {quoted(name)}, {_OTHER_NAMES[name]}"
        )
    return Method(name=name, entry=OBJECTIVES.find(name))
