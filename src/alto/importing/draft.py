"""A task in the making: what a configuration of another tool still has to say, what the task has, and the report."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from alto.errors import SpecError
from alto.spec.job_config import JOB_FIELDS
from alto.spec.keys import NOT_NEEDED_KEYS, UNSUPPORTED_KEYS, asks_for_nothing
from alto.spec.method import Method
from alto.spec.quoting import quoted
from alto.spec.suggestions import nearest_key
from alto.spec.task import TASK_FIELDS

__all__ = ["Answers", "Draft", "Note", "NoteKind", "checked"]


_REMOVE = re.compile(r"[;.]?( [Rr]emove the key)?\.?$")
"""What a remedy of a task file ends with, which an imported one does not need."""


class NoteKind(StrEnum):
    """What became of a key."""

    NOT_SUPPORTED = "not supported"
    UNKNOWN = "unknown"
    USED = "used as"
    NOT_NEEDED = "not needed"


_Kind = TypeVar("_Kind", str, list[Any], dict[Any, Any])
_KIND_NAMES: Mapping[type, str] = {str: "text", list: "a list", dict: "a mapping"}


def checked(value: object, kind: type[_Kind], where: str) -> _Kind:
    """``value``, which is to be text, a list or a mapping.

    Raises:
        SpecError: It is something else.
    """
    if not isinstance(value, kind):
        raise SpecError(f"{where}: expected {_KIND_NAMES[kind]}, found {quoted(value)}. Correct it.")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One line of the report.

    Attributes:
        kind: What became of the key.
        key: As the configuration has it.
        text: What it is used as, or why it is not used.
    """

    kind: NoteKind
    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.kind}{' ' if self.kind is NoteKind.USED else ': '}{self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What is known of the keys of a tool that are taken over or reported without being read one by one.

    Attributes:
        renamed: Keys that are fields of a task under another name, and that name. Other tools' spellings of the same
            field are none of this tool's keys: ``alpha`` of TRL's CPO is not ``lora_alpha``.
        not_needed: Keys that would change nothing of what is learned, and why.
        not_supported: Keys that would, and what to do instead.
        off: Values, beside null, false and what is empty, with which they ask for nothing.
        never_off: Keys of which false is no such value.
    """

    not_needed: Mapping[str, str]
    not_supported: Mapping[str, str]
    renamed: Mapping[str, str] = field(default_factory=dict)
    off: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    never_off: Collection[str] = ()

    def is_off(self, key: str, value: object) -> bool:
        """Whether ``key`` asks for nothing with ``value``."""
        if value is None or value in self.off.get(key, ()):
            return True
        return key not in self.never_off and (value is False or value in ("", [], {}))


@dataclass(slots=True, kw_only=True)
class Draft:
    """A configuration of another tool while it is turned into a task.

    Attributes:
        given: Keys that nothing has read yet.
        folders: Where a relative path may lead: the folder of the file, and the current one.
        values: The keys of the task: canonical names, local files by absolute paths.
        notes: The report so far.
        spellings: The user's spelling of keys that are read under another name.
        replaced: Fields of the task that overrides set.
        is_of_a_class: Whether a class of arguments has written it, with all of its settings and none of the command's:
            TRL's ``use_peft`` is one of the command.
    """

    given: dict[str, Any]
    folders: tuple[Path, ...]
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    spellings: dict[str, str] = field(default_factory=dict)
    replaced: frozenset[str] = frozenset()
    is_of_a_class: bool = False

    def replaces_dataset(self, *keys: str) -> bool:
        """Whether an override names the dataset, so that ``keys``, which say what it is, are not read."""
        if "dataset" not in self.replaced:
            return False
        for key in keys:
            if self.take(key) is not None:
                self.not_needed(key, "'--set dataset' names the rows; dataset_format and columns describe them")
        return True

    def take_text(self, key: str, default: str | None = None) -> str | None:
        """The value of ``key``, which is to be text.

        Raises:
            SpecError: It is something else.
        """
        found = self.take(key, default)
        return None if found is None else checked(found, str, key)

    def take_list(self, key: str) -> list[Any]:
        """The value of ``key``, which is to be a list; empty where there is none.

        Raises:
            SpecError: It is something else.
        """
        found: list[Any] = checked(self.take(key, []), list, key)
        return found

    def rename(self, key: str, name: str) -> None:
        """Read ``key`` under another name from now on; the report has the user's."""
        value = self.take(key)
        if value is not None:
            self.given[name] = value
            self.spellings[name] = key

    def take(self, key: str, default: Any = None) -> Any:
        """The value of ``key``, which counts as read from now on; ``default`` where it is null or not there."""
        value = self.given.pop(key, None)
        return default if value is None else value

    def drop(self, prefixes: tuple[str, ...]) -> None:
        """Leave out all keys that begin with one of ``prefixes``."""
        self.given = {key: value for key, value in self.given.items() if not key.startswith(prefixes)}

    def put(self, field_name: str, value: Any) -> None:
        """Set a key of the task, where ``value`` is not None."""
        if value is not None:
            self.values[field_name] = value

    def used(self, key: str, text: str) -> None:
        """Report that ``key`` has become something else."""
        self._note(NoteKind.USED, key, text)

    def not_needed(self, key: str, text: str) -> None:
        """Report a key that would change nothing of what is learned."""
        self._note(NoteKind.NOT_NEEDED, key, text)

    def not_supported(self, key: str, text: str) -> None:
        """Report a key that would change what is learned."""
        self._note(NoteKind.NOT_SUPPORTED, key, text)

    def unknown(self, key: str, known: Collection[str] | None = None) -> None:
        """Report a key that is none of the tool's, as far as ALTO knows, with the nearest one of ``known``."""
        near = None if known is None else nearest_key(key, known)
        meant = "" if near is None else f" (did you mean {near!r}?)"
        self._note(NoteKind.UNKNOWN, quoted(key)[1:-1], f"no key that ALTO knows{meant}; it is left out")

    def report_unread(self, entry: Mapping[Any, Any], read: Collection[str], where: str) -> None:
        """Report the keys of a mapping inside of the configuration that nothing reads.

        Args:
            entry: The mapping; keys that are null ask for nothing.
            read: Keys that are read, or reported by themselves.
            where: Its place, for the report.
        """
        for key, value in entry.items():
            if value is not None and key not in read:
                self.unknown(f"{where}.{key}")

    def locate(self, path: str) -> str:
        """``path`` as an absolute one, where it leads to something that exists, else as it is."""
        for folder in self.folders:
            try:
                candidate = folder / Path(path).expanduser()
                if candidate.exists():
                    return str(candidate.resolve())
            except (OSError, RuntimeError, ValueError):  # no name of a file
                return path
        return path

    def pass_on(self, answers: Answers, method: Method) -> None:
        """Settle all keys that nothing has read: those of tasks are taken over, all others are reported.

        Args:
            answers: What is known of the tool's own keys.
            method: Method of the task, which decides about settings.
        """
        names = {**method.aliases, **answers.renamed}
        fields = {*JOB_FIELDS, *TASK_FIELDS, *method.fields}
        for key, value in self.given.items():
            name = names.get(key, key)
            if key in answers.not_needed or key in answers.not_supported:
                if not answers.is_off(key, value):
                    self._answer(key, answers.not_needed, answers.not_supported)
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
