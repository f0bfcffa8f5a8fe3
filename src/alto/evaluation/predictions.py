"""Predictions: the texts that models generate for held-out rows, and their scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alto.evaluation.matching import Matching
from alto.evaluation.prompts import Prompt
from alto.evaluation.scorers import Answer, Scorer
from alto.records import Prediction

__all__ = ["predictions_of"]


def predictions_of(
    prompts: Sequence[Prompt], texts: Sequence[Sequence[int]], tokenizer: Any, *, weights: str, scorer: Scorer | None
) -> list[Prediction]:
    """Return a prediction for every prompt.

    Args:
        texts: Token ids of the text generated for each prompt.
        weights: Name of the adapter that generated the texts, or of the base model.
        scorer: Scores the texts; None leaves them without scores.

    Raises:
        ScorerFailedError: The scorer returns no scores.
    """
    answers = [
        Answer(
            prompt=tokenizer.decode(prompt.ids),
            reference=prompt.reference,
            answer=tokenizer.decode(text, skip_special_tokens=True),
        )
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    scores = [None] * len(answers) if scorer is None else scorer(answers, lambda: None)
    return [
        Prediction(
            weights=weights,
            row=row,
            prompt=one.prompt,
            reference=one.reference,
            generated=one.answer,
            extracted=scorer.extracted(one.answer) if isinstance(scorer, Matching) else None,
            correct=bool(score) if isinstance(scorer, Matching) else None,
            score=None if score is None else float(score),
        )
        for row, (one, score) in enumerate(zip(answers, scores, strict=True), start=1)
    ]
