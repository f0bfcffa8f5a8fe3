"""What is to be measured, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from alto.errors import SpecError
from alto.records import Metric

__all__ = ["EvaluationSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """Settings of one evaluation.

    Attributes:
        metric: ``auto`` measures the loss, and exact match too where every reference ends in ``#### N``.
        batch_size: Completions written at a time; changes speed and memory, not the result.
        max_new_tokens: Longest completion; less where the model's positions end before.
        limit: Use only the first rows; None uses all.
        baseline: Measure the base model without the adapter as well.

    Raises:
        SpecError: A value is out of its domain.
    """

    metric: Metric = "auto"
    batch_size: int = 16
    max_new_tokens: int = 512
    limit: int | None = None
    baseline: bool = False

    def __post_init__(self) -> None:
        if self.metric not in get_args(Metric):
            raise SpecError(f"metric: expected one of {', '.join(get_args(Metric))}, found {self.metric!r}")
        for name in ("batch_size", "max_new_tokens", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecError(f"{name}: expected at least 1, found {value}")
