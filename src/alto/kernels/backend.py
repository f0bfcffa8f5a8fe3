"""The choice of the kernel backend.

``triton`` on CUDA if Triton is installed, ``torch`` otherwise; ``ALTO_KERNELS=triton|torch|reference`` overrides this.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType

import torch

from alto.errors import SpecError, UnsupportedError
from alto.version import install_command

_MODULES = {"reference": "reference", "torch": "torch_backend", "triton": "triton_backend"}


def choose_backend(name: str | None = None, *, device: torch.device | str = "cpu") -> ModuleType:
    """Return the module that holds the ops.

    Args:
        name: ``triton``, ``torch`` or ``reference``; None reads the environment variable ``ALTO_KERNELS`` and, if it is
            unset, takes the best for ``device``.

    Raises:
        SpecError: No backend has that name.
        UnsupportedError: ``triton`` was requested by name and cannot run here.
    """
    name = name or os.environ.get("ALTO_KERNELS") or _best(torch.device(device))
    if name not in _MODULES:
        raise SpecError(
            f"ALTO_KERNELS: expected one of {', '.join(sorted(_MODULES))}, found {name!r}; unset it to let ALTO choose"
        )
    if name == "triton":
        _check_triton()
    # Imported only here, so that a machine without Triton never imports its kernels.
    return import_module(f"alto.kernels.{_MODULES[name]}")


def layer_functions_on(device: torch.device | str = "cpu", *, name: str | None = None) -> ModuleType | None:
    """Return :mod:`alto.kernels.layer_functions` if the backend is ``triton``; None otherwise.

    With None, the layers of the base model compute as their own classes do. Takes the same arguments and raises the
    same errors as :func:`choose_backend`.
    """
    if not choose_backend(name, device=device).__name__.endswith(_MODULES["triton"]):
        return None
    return import_module("alto.kernels.layer_functions")


def _best(device: torch.device) -> str:
    return "triton" if device.type == "cuda" and find_spec("triton") is not None else "torch"


def _check_triton() -> None:
    if find_spec("triton") is None:
        raise UnsupportedError(
            f"ALTO_KERNELS=triton: expected Triton, found it not installed; {install_command('gpu')}, or unset it"
        )
    # Triton reads TRITON_INTERPRET, too, and then interprets kernels on the CPU.
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise UnsupportedError(
            "ALTO_KERNELS=triton: expected a CUDA device, found none; unset it, or set TRITON_INTERPRET=1 to run the "
            "kernels in Triton's interpreter, slowly"
        )
    if os.environ.get("TRITON_INTERPRET") == "1" and _release("triton") < (3, 7) and _release("numpy") >= (2, 4):
        # The interpreter converts one-element arrays to numbers, which NumPy 2.4 and later refuse.
        raise UnsupportedError(
            f"TRITON_INTERPRET=1: expected NumPy below 2.4 for the interpreter of Triton {version('triton')}, found "
            f"{version('numpy')}; pip install 'numpy<2.4', or Triton 3.7 or later"
        )


def _release(package: str) -> tuple[int, ...]:
    """Return the major and minor version."""
    return tuple(int(part) for part in version(package).split(".")[:2])
