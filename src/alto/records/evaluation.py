"""Records of finished adapters measured on held-out rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from alto.records.data import LabelValue

ScorerName: TypeAlias = Literal[
    "exact",
    "contains",
    "regex",
    "json",
    "tool_call",
    "numeric",
    "exact_match",
    "format",
    "similarity",
    "multiple_choice",
    "python",
    "http",
]
"""The scorers of answers."""

GRADED_SCORERS: frozenset[ScorerName] = frozenset({"similarity", "python", "http"})
"""The scorers that return other numbers than 1 (right) and 0 (wrong)."""

Metric: TypeAlias = Literal["auto", "loss", "preference", ScorerName]
"""The metric of an evaluation; ``auto`` chooses it by the rows."""

GenerationBackend = Literal["alto", "vllm"]
"""The engine that generates the answers to be scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownAnswer:
    """An answer to a validation prompt while a job that learns from rewards trains, to be shown to the user.

    Attributes:
        prompt, answer: Their texts, cut after 500 characters.
        reward: Its reward; None if no reward could score it.
    """

    prompt: str
    answer: str
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The measurements of one set of weights on held-out rows; a metric that was not measured is None.

    Attributes:
        dataset: Name of the rows, as the user or the task gives it.
        num_rows: Number of rows that were used.
        loss: Loss in nats, per trained token or, for a classifier, per row; None for a regressor, which has ``mse``.
        exact_match: Share of rows, in [0, 1], whose final answer was right: ``score`` of the scorer ``exact_match``.
        num_correct: Number of right answers; None for scorers that return arbitrary numbers.
        reward_accuracy: Share of pairs, in [0, 1], whose chosen reply has the larger log-ratio to the base model.
        reward_margin: Mean difference of the two log-ratios, in nats: rewards at beta 1.
        reward: Mean reward of the answers, by the rewards of the run.
        scorer: The scorer of the answers.
        score: Mean of the scores.
        accuracy: Share of texts, in [0, 1], whose label is predicted correctly; with several labels, all of them.
        macro_f1: Mean F1 score over labels.
        label_f1: F1 score of each label; for rows with one label each, None for a label that no row has and that was
            never predicted.
        confusion: For rows with one label each: number of rows by true label and predicted label, without zeros.
        mse: Mean squared error of a regressor.
        spearman: Rank correlation of predictions and true numbers, averaged over outputs; None if all predictions or
            all true numbers of an output are equal.
        settings: Everything else that decides the numbers: the weights, the base model, and how they were measured.
        date: Date and time, ISO 8601 in UTC.
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
    reward: float | None = None
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
        row: Number of the row among the rows used, from 1.
        prompt: The text as the model saw it.
        reference: The row's own reply; for a pair, the chosen reply.
        generated: The model's answer, without the end token.
        extracted: The part of the answer that a built-in scorer compares; None if it finds none, or if there is no
            built-in scorer.
        correct: Whether the extracted part fully agrees with the reference; None if there is no built-in scorer.
        score: Score of the answer; None if it was not scored.
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
class LabelPrediction:
    """The label that a classification head predicts for one held-out row.

    Attributes:
        weights: The adapter's name.
        row: Number of the row among the rows used, from 1.
        text: The row's text; two texts are separated by a line break, and a conversation is written by the chat
            template.
        label: The row's own label; None if it has none.
        predicted: The predicted label.
        probability: Probability of the predicted label, or of each predicted label if rows have several; None for a
            regression.
    """

    weights: str
    row: int
    text: str
    label: LabelValue | None
    predicted: LabelValue
    probability: float | tuple[float, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEvaluation:
    """The evaluation of one adapter.

    Attributes:
        name: The adapter's job in its run, ``best`` for the run's best adapter, or the folder as the user gave it.
    """

    name: str
    adapter_dir: str
    evaluation: Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """The evaluations of adapters, of the base model alone if requested, every generated text or predicted label, and
    notices."""

    adapters: tuple[AdapterEvaluation, ...]
    baseline: Evaluation | None
    predictions: tuple[Prediction, ...]
    label_predictions: tuple[LabelPrediction, ...] = ()
    notes: tuple[str, ...] = ()


_NORMAL = statistics.NormalDist().inv_cdf(0.975)
_STUDENT = {1: 12.706, 2: 4.303, 3: 3.182}
"""The 97.5 % quantiles of Student's t distribution for which the expansion below is off by more than 2 %."""


def student_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution with ``degrees`` degrees of freedom.

    Above three degrees it is computed by the first terms of the Cornish-Fisher expansion, within 2 %.
    """
    if degrees in _STUDENT:
        return _STUDENT[degrees]
    z = _NORMAL
    first = (z**3 + z) / (4 * degrees)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    return z + first + second


def wilson_interval(proportion: float, num_rows: int) -> tuple[float, float]:
    """Return Wilson's 95 % score interval of a proportion, whose width is not zero even if all rows are equal."""
    squared = _NORMAL**2 / num_rows
    middle = (proportion + squared / 2) / (1 + squared)
    half = math.sqrt(proportion * (1 - proportion) * squared + squared**2 / 4) / (1 + squared)
    return max(0.0, middle - half), min(1.0, middle + half)
