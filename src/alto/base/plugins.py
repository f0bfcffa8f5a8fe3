"""Registries of objects that a task names: ALTO's own, and entry points of installed packages."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from alto.base.text import quoted
from alto.errors import AltoError, SpecError, UnsupportedError


@contextlib.contextmanager
def naming_errors(
    call: str, module: str, *, page: str, passes: Callable[[BaseException], bool] = lambda error: False
) -> Iterator[None]:
    """Report an error raised in the ``with`` block as an error of the package that ``module`` belongs to.

    ALTO's own errors pass unchanged. If ``module`` is ALTO's, every error passes: it is a bug, and its traceback is
    needed.

    Args:
        call: The function that is called, for the message: ``Plateau.judge``.
        module: Module of that function.
        page: The page of the documentation that says what the function must do.
        passes: Whether an error passes unchanged, because a caller handles it.

    Raises:
        UnsupportedError: The block raised any other error.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, AltoError) or passes(error) or _top(module) == "alto":
            raise
        raise UnsupportedError(
            f"{call}: expected it to work as {page} says, found that it raises {described(error, module)}; correct "
            "that package, or do not use it"
        ) from error


def described(error: BaseException, module: str) -> str:
    """Describe ``error`` by its class, its message, and the last traceback line in the package of ``module``."""
    package, place = _top(module), ""
    traceback = error.__traceback__
    while traceback is not None:
        if _top(str(traceback.tb_frame.f_globals.get("__name__", ""))) == package:
            place = f", in {Path(traceback.tb_frame.f_code.co_filename).name}:{traceback.tb_lineno} of {package}"
        traceback = traceback.tb_next
    return type(error).__name__ + (f": {error}" if str(error) else "") + place


def _top(module: str) -> str:
    return module.partition(".")[0]


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry(Generic[T]):
    """All objects of one kind by name.

    Attributes:
        group: Entry-point group under which packages register their objects.
        key: The task's key that names an object, for messages.
        page: The page of the documentation about adding an object.
        own: ALTO's objects by name: the object itself, or its ``module:attribute``, which is imported when needed.
        check: Function that returns a loaded entry point if it is of this kind, and raises `SpecError` if not.
    """

    group: str
    key: str
    page: str
    own: Mapping[str, T | str]
    check: Callable[[object], T]

    def names(self) -> tuple[str, ...]:
        """Return all names: ALTO's own in their order, then those of installed packages. Nothing is imported."""
        others = {entry.name for entry in entry_points(group=self.group)}
        return (*self.own, *sorted(others - self.own.keys()))

    def find(self, name: str) -> T:
        """Return the object with this name. Installed packages are searched only if the name is not ALTO's own.

        Raises:
            SpecError: There is no such name.
            UnsupportedError: Several packages register the name, or the entry cannot be loaded or is of another kind.
        """
        own = self.own.get(name)
        if own is not None:
            return self.check(load_attribute(own)) if isinstance(own, str) else own
        found = tuple(entry_points(group=self.group, name=name))
        if not found:
            raise self._unknown(name)
        if len(found) > 1:
            values = ", ".join(sorted(entry.value for entry in found))
            raise UnsupportedError(
                f"{self.key}: expected one installed package that registers {name!r}, found {len(found)} ({values}); "
                "remove all but one"
            )
        (entry,) = found
        try:
            return self.check(entry.load())
        except Exception as error:
            raise UnsupportedError(
                f"{self.key}: expected {entry.value} of the package that registers {name!r}, found that it cannot be "
                f"used ({described(error, entry.module)}); correct it as described in {self.page}, or remove it"
            ) from error

    def check_not_taken(self, name: str) -> None:
        """Check that no package registers ``name``, which belongs to ALTO; :meth:`find` would ignore that package.

        It reads the entry points of all packages, so it is called once, before the entry is used.

        Raises:
            UnsupportedError: A package registers ``name``.
        """
        others = entry_points(group=self.group, name=name) if name in self.own else ()
        for other in others:
            raise UnsupportedError(
                f"{self.key}: expected {name!r} to be registered by ALTO only, found that a package registers "
                f"{other.value} under that name, where it is never used; register it under a different name, or "
                "remove that package"
            )

    def _unknown(self, name: str) -> SpecError:
        names = self.names()
        near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        return SpecError(
            f"{self.key} should be one of {', '.join(names)}, found {quoted(name)}. Correct the name{meant}, or "
            f"install the package that registers it under {self.group}."
        )


def load_attribute(path: str) -> Any:
    """Import and return the object that ``module:attribute`` names.

    Raises:
        ImportError, AttributeError: There is no such module or attribute.
    """
    return EntryPoint(name=path, value=path, group="").load()
