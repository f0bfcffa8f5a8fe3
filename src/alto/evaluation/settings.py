"""Settings of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from alto.errors import SpecError
from alto.records import GenerationBackend, Metric
from alto.spec import Scoring, parse_metric

_USUAL_NEW_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """Settings of one evaluation.

    Attributes:
        metric: A word; a scorer of answers with the settings of ``select_by`` except ``at``, ``num_rows`` and
            ``max_new_tokens``; or a function that scores answers. ``auto`` measures the preference if rows are pairs;
            for a run that learned from rewards, the mean reward of the answers; else the loss, and the score of answers
            if all rows can be scored: by the built-in scorer of the run's ``select_by``, or by exact match. Adapters
            with a classification head are always measured on their labels.
        batch_size: Number of texts generated at a time, over all adapters. It affects speed and memory; results differ
            by rounding only.
        max_new_tokens: Maximum length of a generated text; less if the model has fewer positions left. None means 512,
            or for the rewards of a run the ``max_completion_length`` of its job.
        limit: Number of rows to use, from the first; None uses all.
        baseline: Also measure the base model without an adapter.
        predictions: Generate an answer to every row, with the base model too, even if no metric needs it. Adapters with
            a classification head return the predicted label of every row instead, for texts without labels, too.
        backend: The engine that generates answers: ``alto``, or ``vllm``, which can measure nothing else.

    Raises:
        SpecError: A value is not allowed.
    """

    metric: Metric | Mapping[str, Any] | Scoring | Callable[..., float] = "auto"
    batch_size: int = 64
    max_new_tokens: int | None = None
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
                f"backend: expected alto for the metric {what!r}, found vllm, which only generates answers; leave "
                "backend out, or measure a score of generated answers"
            )

    @property
    def num_new_tokens(self) -> int:
        """Maximum length of a generated text."""
        return self.max_new_tokens or _USUAL_NEW_TOKENS

    @property
    def scoring(self) -> Scoring | None:
        """The scorer that ``metric`` names; None if it names none."""
        found = parse_metric(self.metric)
        return found if isinstance(found, Scoring) else None
