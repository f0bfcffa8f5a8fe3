"""The interface of optimizers that own one row of a bank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from alto.spec import JobConfig

__all__ = ["RowOptimizer"]


class RowOptimizer(Protocol):
    """The optimizer of one adapter.

    Matrices are named ``<module>.A`` and ``<module>.B`` and have PEFT's orientation: ``[r, K]`` and ``[N, r]``, for
    in-features ``K``, out-features ``N`` and rank ``r``. Extra tensors of the adapter keep their own names.
    """

    def step(
        self,
        matrices: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        *,
        grad_scale: Tensor,
        config: JobConfig,
        learning_rate: float,
    ) -> None:
        """Take one step on ``matrices`` in place. If memory runs out, nothing changes.

        Args:
            matrices: The adapter's matrices and extra tensors, any strides.
            gradients: Their gradients.
            grad_scale: Factor on the gradients (clipping), a scalar.
            learning_rate: Learning rate of every ``A``. ``B`` and vectors use it times ``config.loraplus_lr_ratio``.
        """
        ...

    def read(self) -> dict[str, Tensor]:
        """Return a copy of the state on the CPU, by ``<matrix>.<part>``."""
        ...

    def write(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Restore a state that :meth:`read` returned after ``step`` steps."""
        ...
