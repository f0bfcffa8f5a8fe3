"""Settings of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from alto.errors import SpecError
from alto.records import GenerationBackend, Metric

__all__ = ["EvaluationSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """Settings of one evaluation.

    Attributes:
        metric: ``auto`` measures the preference where rows are pairs; of others the loss, and exact match too where
            every reference ends in ``#### N``.
        batch_size: Texts generated at a time, of all adapters; affects speed and memory, and the result by rounding
            only.
        max_new_tokens: Longest text; less where the model's positions end before.
        limit: Use only the first rows; None uses all.
        baseline: Measure the base model without an adapter as well.
        predictions: Generate an answer to every row, by the base model too, also where no metric needs it.
        backend: Generates the answers: ``alto``, or ``vllm``, which can measure exact match only.

    Raises:
        SpecError: A value is out of its domain.
    """

    metric: Metric = "auto"
    batch_size: int = 64
    max_new_tokens: int = 512
    limit: int | None = None
    baseline: bool = False
    predictions: bool = False
    backend: GenerationBackend = "alto"

    def __post_init__(self) -> None:
        for name, known in (("metric", get_args(Metric)), ("backend", get_args(GenerationBackend))):
            if getattr(self, name) not in known:
                raise SpecError(f"{name}: expected one of {', '.join(known)}, found {getattr(self, name)!r}")
        for name in ("batch_size", "max_new_tokens", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecError(f"{name}: expected at least 1, found {value}")
        if self.backend == "vllm" and self.metric in ("loss", "preference"):
            raise SpecError(
                f"backend: expected alto for the metric {self.metric!r}, found vllm, which only generates; leave it "
                "out, or measure exact_match"
            )
