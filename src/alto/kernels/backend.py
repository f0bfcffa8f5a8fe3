"""Which implementation of the ops is used: one place, one rule.

``ALTO_KERNELS=torch|reference`` overrides the choice; without it the torch backend is taken.
"""

from __future__ import annotations

import os
from types import ModuleType

from alto.errors import SpecError
from alto.kernels import reference, torch_backend

__all__ = ["choose_backend"]

_BACKENDS: dict[str, ModuleType] = {"torch": torch_backend, "reference": reference}


def choose_backend(name: str | None = None) -> ModuleType:
    """The module that holds the ops.

    Args:
        name: ``torch`` or ``reference``; None asks the environment variable ``ALTO_KERNELS``, then takes ``torch``.

    Raises:
        SpecError: No backend has that name.
    """
    name = name or os.environ.get("ALTO_KERNELS") or "torch"
    if name not in _BACKENDS:
        raise SpecError(
            f"ALTO_KERNELS: expected one of {sorted(_BACKENDS)}, found {name!r}; unset it to let ALTO choose"
        )
    return _BACKENDS[name]
