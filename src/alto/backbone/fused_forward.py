"""A forward pass that replaces a module's own."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

__all__ = ["FusedForward"]


class FusedForward:
    """The ``forward`` attribute of a module that computes the same as the module's class with fewer kernels.

    It does not keep the module alive.

    Attributes:
        op: The operation that is fused.
        signature: Two forward passes with equal signatures launch the same kernels.
        is_observed: Whether the model's trial forward pass is over.
        why_not: Why the module's own forward pass was used instead; empty if it never was.
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
        """Launch the kernels of a training step once, forward and backward, on a few tokens.

        Args:
            dtype: Dtype of the activations.
            device: Device of the model.
        """
        raise NotImplementedError

    def own_forward(self, why: str, *args: Any, **kwargs: Any) -> Tensor:
        """Run the forward pass of the module's class, and record why it is used."""
        self.why_not = why
        output: Tensor = type(self.module).forward(self.module, *args, **kwargs)
        return output
