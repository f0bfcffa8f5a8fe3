"""Where each linear module's adapter lies in a row of the bank."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BankLayout", "TargetModule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetModule:
    """A linear module of the base model: full name, in-features ``K``, out-features ``N``."""

    name: str
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BankLayout:
    """Where each module's ``A`` (``[K, R]``) and ``B`` (``[R, N]``) lie in a row of the bank.

    A row holds the modules end to end in the model's order, ``A`` before ``B``.

    Attributes:
        modules: Every module that at least one job targets.
        max_rank: ``R``, the largest rank a slot can hold.
    """

    modules: tuple[TargetModule, ...]
    max_rank: int

    @property
    def row_size(self) -> int:
        """``P``, parameters of a slot."""
        return sum(self.max_rank * (module.in_features + module.out_features) for module in self.modules)

    def offsets(self) -> list[tuple[int, int]]:
        """Start of ``A`` and of ``B`` of every module in a row."""
        result, start = [], 0
        for module in self.modules:
            b_start = start + module.in_features * self.max_rank
            result.append((start, b_start))
            start = b_start + self.max_rank * module.out_features
        return result

    def b_spans(self) -> list[tuple[int, int]]:
        """Columns ``[start, end)`` of a row that hold the modules' ``B``."""
        sizes = (self.max_rank * module.out_features for module in self.modules)
        return [(start, start + size) for (_, start), size in zip(self.offsets(), sizes, strict=True)]
