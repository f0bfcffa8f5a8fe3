"""The base class of all modules that replace a module of the base model."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["InjectedModule"]


class InjectedModule(nn.Module):
    """A module that computes what a base-model module computes, plus the changes made by the adapters of all slots.

    Attributes:
        base: The replaced module. Outside of a schedule, the injected module behaves exactly like it.
    """

    base: Any
