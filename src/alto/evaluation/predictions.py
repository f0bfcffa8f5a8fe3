"""Predictions: the texts that models generate for held-out rows, and what a scorer says of each."""

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
    """The prediction for every prompt.

    Args:
        prompts: The prompts.
        texts: Token ids of the text generated for each.
        tokenizer: Decodes the texts.
        weights: Name of the adapter, or of the base model, that wrote them.
        scorer: Scores them; None scores nothing.

    Raises:
        ScorerFailedError: The scorer gives no scores.
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
