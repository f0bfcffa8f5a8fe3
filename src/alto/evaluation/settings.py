"""Settings of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from alto.errors import SpecError
from alto.records import GenerationBackend, Metric
from alto.spec import Scoring, parse_metric

__all__ = ["EvaluationSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """Settings of one evaluation.

    Attributes:
        metric: A word; a scorer of generated answers with its settings, as ``select_by`` has them, without ``at``,
            ``num_rows`` and ``max_new_tokens``; or a function that scores them. ``auto`` measures the preference where
            rows are pairs; of others the loss, and their answers where all can be scored: by the built-in scorer of the
            run's ``select_by``, else by exact match. Adapters with a head are measured by what the head learned.
        batch_size: Texts generated at a time, of all adapters; affects speed and memory, and the result by rounding
            only.
        max_new_tokens: Longest text; less where the model's positions end before.
        limit: Use only the first rows; None uses all.
        baseline: Measure the base model without an adapter as well.
        predictions: Generate an answer to every row, by the base model too, also where no metric needs it.
        backend: Generates the answers: ``alto``, or ``vllm``, which measures nothing else.

    Raises:
        SpecError: A value is out of its domain.
    """

    metric: Metric | Mapping[str, Any] | Scoring | Callable[..., float] = "auto"
    batch_size: int = 64
    max_new_tokens: int = 512
    limit: int | None = None
    baseline: bool = False
    predictions: bool = False
    backend: GenerationBackend = "alto"

    def __post_init__(self) -> None:
        if self.backend not in get_args(GenerationBackend):
            known = ", ".join(get_args(GenerationBackend))
            raise SpecError(f"backend: expected one of {known}, found {self.backend!r}")
        found = self.scoring
        for name in ("batch_size", "max_new_tokens", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecError(f"{name}: expected at least 1, found {value}")
        is_generated = found is not None and found.scorer != "multiple_choice"
        if self.backend == "vllm" and self.metric != "auto" and not is_generated:
            what = self.metric if found is None else found.scorer
            raise SpecError(
                f"backend: expected alto for the metric {what!r}, found vllm, which only generates; leave it out, or "
                "measure a score of generated answers"
            )

    @property
    def scoring(self) -> Scoring | None:
        """The scorer that ``metric`` names; None where it names none."""
        found = parse_metric(self.metric)
        return found if isinstance(found, Scoring) else None
