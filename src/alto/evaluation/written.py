"""Scoring of generated answers, for several adapters at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alto.backbone import Backbone
from alto.data import Conversation
from alto.evaluation.generate import check_prompts, complete, max_positions
from alto.evaluation.prompts import prompts_of
from alto.evaluation.scorers import Answer, OnTurn, Scorer
from alto.evaluation.settings import EvaluationSettings
from alto.lora import ServedAdapters

__all__ = ["WrittenAnswers"]


class WrittenAnswers:
    """A scorer that lets each adapter generate one greedy answer to each row, and scores the texts.

    Args:
        rows: Rows with a reply, which is the reference.
        scorer: Scores the texts of one adapter.
        max_new_tokens: Maximum length of an answer.

    Raises:
        DataError: A row has no prompt, or its prompt leaves no position for an answer.
    """

    def __init__(
        self, rows: Sequence[Conversation], backbone: Backbone, scorer: Scorer, *, max_new_tokens: int
    ) -> None:
        prompts = prompts_of(rows, backbone.tokenizer)
        self.prompts = [prompt.ids for prompt in prompts]
        self._references = [prompt.reference for prompt in prompts]
        check_prompts(self.prompts, max_positions(backbone))
        self._backbone = backbone
        self._scorer = scorer
        self._max_new_tokens = max_new_tokens

    def scores(self, served: ServedAdapters, names: Sequence[str], on_turn: OnTurn) -> list[Sequence[float]]:
        """Return each adapter's scores of all rows.

        Args:
            names: Not used; part of the interface that :class:`~alto.evaluation.choices.Choices` shares.
            on_turn: Called after every token, and regularly while the scorer runs.

        Raises:
            DeviceMemoryError: Memory is too small for a single text.
            ScorerFailedError: The scorer returns no scores.
        """
        texts = complete(
            self._backbone,
            served,
            self.prompts,
            max_new_tokens=self._max_new_tokens,
            batch_size=EvaluationSettings().batch_size,
            on_done=lambda _: on_turn(),
        )
        return [self._scorer(self._answers(of_adapter), on_turn) for of_adapter in texts]

    def _answers(self, texts: Sequence[Sequence[int]]) -> list[Answer]:
        tokenizer: Any = self._backbone.tokenizer
        return [
            Answer(
                prompt=tokenizer.decode(prompt),
                reference=reference,
                answer=tokenizer.decode(text, skip_special_tokens=True),
            )
            for prompt, reference, text in zip(self.prompts, self._references, texts, strict=True)
        ]
