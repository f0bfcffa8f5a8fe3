"""What the optimizers that own one row of a bank have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from alto.spec import JobConfig

__all__ = ["RowOptimizer"]


class RowOptimizer(Protocol):
    """The optimizer of one adapter.

    Matrices go by ``<module>.A`` and ``<module>.B`` and have PEFT's orientation: ``[r, K]`` and ``[N, r]``, for
    in-features ``K``, out-features ``N`` and rank ``r``. Further tensors of the adapter go by their own names.
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
        """One step of ``matrices``, in place; where there is no memory for it, nothing is changed.

        Args:
            matrices: The adapter's, and its further tensors, any strides.
            gradients: Theirs.
            grad_scale: Factor on the gradients (clipping), a scalar.
            config: Of the job.
            learning_rate: Of every ``A``; that of ``B`` and of vectors follows by ``config.loraplus_lr_ratio``.
        """
        ...

    def read(self) -> dict[str, Tensor]:
        """A copy of the state on the CPU, by ``<matrix>.<part>``."""
        ...

    def write(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Restore a state that :meth:`read` returned after ``step`` steps."""
        ...
