"""Generated answers of several adapters at once, and their scores."""

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
    """Lets adapters answer rows, each once and greedily, and scores the texts.

    Args:
        rows: Rows with a reply, which is the reference.
        backbone: The base.
        scorer: Scores the texts of one adapter.
        max_new_tokens: Longest text.

    Raises:
        DataError: A row has no prompt, or one that leaves no position to write to.
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
        """Of every adapter, the score of every row.

        Args:
            served: The adapters on the base.
            names: Not used: texts need no names.
            on_turn: Called after every token, and while the scorer works.

        Raises:
            DeviceMemoryError: Not even one text fits into memory.
            ScorerFailedError: The scorer gives no scores.
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
