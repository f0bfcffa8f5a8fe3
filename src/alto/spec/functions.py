"""Functions that a user gives as objects; a task stores their module and name if they can be imported by these."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeGuard

__all__ = ["is_function", "name_of"]


def is_function(value: object) -> TypeGuard[Callable[..., Any]]:
    """Return whether ``value`` is a function, or an object that can be called like one; classes do not count."""
    return callable(value) and not isinstance(value, type)


def name_of(function: Callable[..., Any]) -> str:
    """Return the dotted name by which another process can import ``function``, such as ``package.module:score``.

    Raises:
        ValueError: ``function`` is defined in the main program or notebook, inside another function, or has no name in
            its module.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    found: Any = sys.modules.get(module) if isinstance(module, str) else None
    for part in (name or "").split("."):
        found = getattr(found, part, None)
    if found is function and module != "__main__":
        return f"{module}:{name}"
    where = "the program or the notebook itself" if module == "__main__" else str(module or "no module")
    raise ValueError(
        "should be a function that other processes can import by its name, found "
        f"{name or type(function).__name__} of {where}. Define it at the top of a module in the current folder, or in "
        "a package, and import it from there."
    )
