"""A forward pass that takes the place of a module's own."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

__all__ = ["FusedForward"]


class FusedForward:
    """Set as ``forward`` of a module, it computes in fewer kernels what the module's class computes.

    It does not keep the module alive.

    Attributes:
        op: The operation that is fused.
        signature: Two with equal ones launch the same kernels.
        is_observed: Whether the model's forward pass has been observed.
        why_not: Why the module's own forward pass computed instead; empty where it never did.
    """

    op: ClassVar[str]

    def __init__(self, module: nn.Module, *signature: Any) -> None:
        self._module = weakref.ref(module)
        self.signature = (self.op, *signature)
        self.is_observed = False
        self.why_not = ""

    @property
    def module(self) -> Any:
        module = self._module()
        assert module is not None, "it is called by its module"
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def sample(self, dtype: torch.dtype, device: torch.device) -> None:
        """Launch once, forward and backward and on a few tokens, what a step of training launches.

        Args:
            dtype: Of the activations.
            device: Of the model.
        """
        raise NotImplementedError

    def own_forward(self, why: str, *args: Any, **kwargs: Any) -> Tensor:
        """The forward pass of the module's class, and ``why`` it computes."""
        self.why_not = why
        output: Tensor = type(self.module).forward(self.module, *args, **kwargs)
        return output
