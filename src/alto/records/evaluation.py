"""Finished adapters, measured on held-out rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["AdapterEvaluation", "Evaluation", "EvaluationResult", "GenerationBackend", "Metric", "Prediction"]

Metric = Literal["auto", "loss", "exact_match", "preference"]
"""The metric of an evaluation; ``auto`` is chosen by the rows."""


GenerationBackend = Literal["alto", "vllm"]
"""What generates the answers that are judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The measurements of one set of weights on held-out rows; a metric that was not measured is None.

    Attributes:
        dataset: The rows, as the user or the task names them.
        num_rows: How many of them were used.
        loss: Nats per trained token.
        exact_match: Share of the rows, in [0, 1], whose final answer was right.
        num_correct: How many rows that is.
        reward_accuracy: Share of the pairs, in [0, 1], whose chosen reply has the larger log-ratio to the base.
        reward_margin: Mean difference of the two log-ratios, in nats: rewards at beta 1.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A model's answer to one held-out row.

    Attributes:
        weights: The adapter's name, or ``base`` for the base model alone.
        row: Number of the row among those that were used, from 1.
        prompt: The text as the model saw it.
        reference: The row's own reply; of a pair the chosen one.
        generated: The model's answer, without the token that ended it.
        extracted: The final answer in that, None where there is none or exact match was not measured.
        correct: Whether it is the reference's; None where exact match was not measured.
    """

    weights: str
    row: int
    prompt: str
    reference: str
    generated: str
    extracted: str | None
    correct: bool | None


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
