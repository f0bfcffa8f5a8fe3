"""The state of an import: keys of the configuration that are not read yet, the task so far, and the report."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from alto.base import nearest_key, quoted
from alto.errors import SpecError
from alto.importing.keys import KeyTable
from alto.spec import JOB_FIELDS, NOT_NEEDED_KEYS, TASK_FIELDS, UNSUPPORTED_KEYS, Method, asks_for_nothing

_REMOVE = re.compile(r"[;.]?( [Rr]emove the key)?\.?$")
"""The end of a remedy for task files that does not apply to imported configurations."""


class NoteKind(StrEnum):
    """The outcome of importing a key."""

    NOT_SUPPORTED = "not supported"
    UNKNOWN = "unknown"
    USED = "used as"
    NOT_NEEDED = "not needed"


_Kind = TypeVar("_Kind", str, list[Any], dict[Any, Any])
_KIND_NAMES: Mapping[type, str] = {str: "text", list: "a list", dict: "a mapping"}


def checked(value: object, kind: type[_Kind], where: str) -> _Kind:
    """Return ``value`` if it has the type ``kind``: text, a list or a mapping."""
    if not isinstance(value, kind):
        raise SpecError(f"{where}: expected {_KIND_NAMES[kind]}, found {quoted(value)}. Correct it.")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One line of the report.

    Attributes:
        text: The setting that replaces the key, or the reason why it is not used.
    """

    kind: NoteKind
    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.kind}{' ' if self.kind is NoteKind.USED else ': '}{self.text}"


@dataclass(slots=True, kw_only=True)
class Draft:
    """A configuration of another tool that is being converted to a task.

    Attributes:
        given: Keys that are not read yet.
        folders: Base folders of relative paths: the folder of the file, and the current folder.
        values: Keys of the task: canonical names, absolute paths of local files.
        spellings: The user's spelling of keys that are read under another name.
        replaced: Fields of the task that overrides set.
        is_of_a_class: Whether the configuration comes from an arguments class. It then has all settings of the class
            and none of the command line, such as TRL's ``use_peft``.
    """

    given: dict[str, Any]
    folders: tuple[Path, ...]
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    spellings: dict[str, str] = field(default_factory=dict)
    replaced: frozenset[str] = frozenset()
    is_of_a_class: bool = False

    def replaces_dataset(self, *keys: str) -> bool:
        """Return whether an override names the dataset; if so, report ``keys``, which describe it, as not needed."""
        if "dataset" not in self.replaced:
            return False
        for key in keys:
            if self.take(key) is not None:
                self.not_needed(key, "'--set dataset' names the rows; dataset_format and columns describe them")
        return True

    def take_text(self, key: str, default: str | None = None) -> str | None:
        """Take the value of ``key``, and check that it is text."""
        found = self.take(key, default)
        return None if found is None else checked(found, str, key)

    def take_list(self, key: str) -> list[Any]:
        """Take the value of ``key``, and check that it is a list; return an empty list if there is no value."""
        found: list[Any] = checked(self.take(key, []), list, key)
        return found

    def rename(self, key: str, name: str) -> None:
        """Rename ``key`` to ``name`` for all later reads; the report keeps the user's spelling."""
        value = self.take(key)
        if value is not None:
            self.given[name] = value
            self.spellings[name] = key

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of ``key``, and mark it as read; return ``default`` if it is null or missing."""
        value = self.given.pop(key, None)
        return default if value is None else value

    def drop(self, prefixes: tuple[str, ...]) -> None:
        """Remove all keys that begin with one of ``prefixes``."""
        self.given = {key: value for key, value in self.given.items() if not key.startswith(prefixes)}

    def put(self, field_name: str, value: Any) -> None:
        """Set a key of the task, unless ``value`` is None."""
        if value is not None:
            self.values[field_name] = value

    def used(self, key: str, text: str) -> None:
        """Report that ``key`` is used as another setting."""
        self._note(NoteKind.USED, key, text)

    def not_needed(self, key: str, text: str) -> None:
        """Report a key that does not affect training."""
        self._note(NoteKind.NOT_NEEDED, key, text)

    def not_supported(self, key: str, text: str) -> None:
        """Report a key that would affect training."""
        self._note(NoteKind.NOT_SUPPORTED, key, text)

    def unknown(self, key: str, known: Collection[str] | None = None) -> None:
        """Report a key that ALTO does not know, with the most similar key in ``known``."""
        near = None if known is None else nearest_key(key, known)
        meant = "" if near is None else f" (did you mean {near!r}?)"
        self._note(NoteKind.UNKNOWN, quoted(key)[1:-1], f"ALTO does not know this key{meant}; it is left out")

    def report_unread(self, entry: Mapping[Any, Any], read: Collection[str], where: str) -> None:
        """Report the keys of a nested mapping that are not read.

        Args:
            entry: The mapping; keys with null are ignored.
            read: Keys that are read or reported elsewhere.
        """
        for key, value in entry.items():
            if value is not None and key not in read:
                self.unknown(f"{where}.{key}")

    def locate(self, path: str) -> str:
        """Return the absolute path of ``path`` if it exists, else ``path`` unchanged."""
        for folder in self.folders:
            try:
                candidate = folder / Path(path).expanduser()
                if candidate.exists():
                    return str(candidate.resolve())
            except (OSError, RuntimeError, ValueError):  # not a valid file name
                return path
        return path

    def pass_on(self, table: KeyTable, method: Method) -> None:
        """Process all keys that are not read yet: copy those that are task fields, and report the others."""
        names = table.names(method)
        fields = {*JOB_FIELDS, *TASK_FIELDS, *method.fields}
        for key, value in self.given.items():
            name = names.get(key, key)
            if key in table.not_needed or key in table.not_supported:
                if not table.is_off(key, value):
                    self._answer(key, table.not_needed, table.not_supported)
            elif name in fields and name not in self.values:
                self.put(name, value)
            elif value is None or asks_for_nothing(key, value):
                continue
            elif name in fields:
                self.not_needed(key, f"another key has set {name}")
            elif name in method.known_keys:
                self.not_needed(key, f"method {method.name} has no such setting")
            elif key in UNSUPPORTED_KEYS or key in NOT_NEEDED_KEYS:
                self._answer(key, NOT_NEEDED_KEYS, UNSUPPORTED_KEYS)
            else:
                self.unknown(key, {*fields, *names})
        self.given.clear()

    def _note(self, kind: NoteKind, key: str, text: str) -> None:
        self.notes.append(Note(kind=kind, key=self.spellings.get(key, key), text=text))

    def _answer(self, key: str, not_needed: Mapping[str, str], not_supported: Mapping[str, str]) -> None:
        if key in not_needed:
            self.not_needed(key, not_needed[key])
        else:
            self.not_supported(key, _REMOVE.sub("", not_supported[key]))
