"""The trained tensors of one adapter, outside of a bank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["AdapterWeights"]


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights(Mapping[str, tuple[Tensor, Tensor]]):
    """One adapter, on the CPU. As a mapping, it gives the low-rank matrices by module name.

    Attributes:
        matrices: ``A`` as ``[K, r]`` and ``B`` as ``[r, N]`` by module name; for ``E`` experts in one parameter
            ``[E, K, r]`` and ``[E, r, N]``.
        extras: Its extra tensors by name; see :class:`alto.lora.layout.ExtraTensor`.
    """

    matrices: Mapping[str, tuple[Tensor, Tensor]]
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> tuple[Tensor, Tensor]:
        return self.matrices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.matrices)

    def __len__(self) -> int:
        return len(self.matrices)
