"""The base class of all modules that take the place of a module of the base model."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["InjectedModule"]


class InjectedModule(nn.Module):
    """Computes what a module of the base model computes, with what the adapters of all slots change in it.

    Attributes:
        base: The module whose place it has. Outside of a schedule it is only that.
    """

    base: Any
