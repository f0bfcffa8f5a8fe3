"""Finished adapters, measured on held-out rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

__all__ = [
    "AdapterEvaluation",
    "Evaluation",
    "EvaluationResult",
    "GenerationBackend",
    "Metric",
    "Prediction",
    "ScorerName",
]

ScorerName: TypeAlias = Literal[
    "exact",
    "contains",
    "regex",
    "json",
    "tool_call",
    "numeric",
    "exact_match",
    "multiple_choice",
    "python",
    "http",
]
"""The scorers of answers."""

Metric: TypeAlias = Literal["auto", "loss", "preference", ScorerName]
"""The metric of an evaluation; ``auto`` is chosen by the rows."""

GenerationBackend = Literal["alto", "vllm"]
"""What generates the answers that are judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The measurements of one set of weights on held-out rows; a metric that was not measured is None.

    Attributes:
        dataset: The rows, as the user or the task names them.
        num_rows: How many of them were used.
        loss: Nats per trained token, of a classifier per row; None of a regressor, which has ``mse``.
        exact_match: Share of the rows, in [0, 1], whose final answer was right: ``score`` of that scorer.
        num_correct: How many answers were right; None of scorers that give any number.
        reward_accuracy: Share of the pairs, in [0, 1], whose chosen reply has the larger log-ratio to the base.
        reward_margin: Mean difference of the two log-ratios, in nats: rewards at beta 1.
        scorer: What scored the answers.
        score: Mean of its scores.
        accuracy: Share of the texts, in [0, 1], whose label a classifier predicts; of several labels, all of them.
        macro_f1: Mean over labels of the harmonic mean of precision and recall.
        label_f1: By label, that number; of rows with one label each, None for a label that no row has or was given.
        confusion: Where rows have one label each: by that label and the predicted one, how many there are; only those
            that there are.
        mse: Mean squared error of a regressor.
        spearman: Rank correlation of predictions and numbers, of several outputs their mean; None where all are equal.
        settings: All else that decides the numbers: which weights, on which base, measured how.
        date: When, ISO 8601 in UTC.
    """

    dataset: str
    num_rows: int
    loss: float | None
    exact_match: float | None
    num_correct: int | None
    settings: Mapping[str, Any]
    date: str
    reward_accuracy: float | None = None
    reward_margin: float | None = None
    scorer: ScorerName | None = None
    score: float | None = None
    accuracy: float | None = None
    macro_f1: float | None = None
    label_f1: Mapping[str, float | None] | None = None
    confusion: Mapping[str, Mapping[str, int]] | None = None
    mse: float | None = None
    spearman: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A model's answer to one held-out row.

    Attributes:
        weights: The adapter's name, or ``base`` for the base model alone.
        row: Number of the row among those that were used, from 1.
        prompt: The text as the model saw it.
        reference: The row's own reply; of a pair the chosen one.
        generated: The model's answer, without the token that ended it.
        extracted: What a built-in scorer reads of it; None where it finds nothing, or there is no such scorer.
        correct: Whether that agrees with the reference; None where there is no such scorer.
        score: Score of the answer; None where nothing scored it.
    """

    weights: str
    row: int
    prompt: str
    reference: str
    generated: str
    extracted: str | None
    correct: bool | None
    score: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEvaluation:
    """The numbers of one adapter.

    Attributes:
        name: A job of its run, ``best`` for the run's best, or the folder as it was given.
    """

    name: str
    adapter_dir: str
    evaluation: Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """The numbers of adapters, those of their base model alone where requested, and every text that was generated."""

    adapters: tuple[AdapterEvaluation, ...]
    baseline: Evaluation | None
    predictions: tuple[Prediction, ...]
