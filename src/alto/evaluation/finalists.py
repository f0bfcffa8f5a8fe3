"""Scores the best jobs of a task by their answers to its validation rows: the lowest loss need not mean the best
answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from alto.backbone import Backbone
from alto.data import Conversation, Pair
from alto.errors import DataError
from alto.evaluation.adapter import loaded_adapters
from alto.evaluation.answers import has_final_answers
from alto.evaluation.exact_match import judge_texts, make_questions
from alto.evaluation.generate import check_prompts, complete, max_positions
from alto.evaluation.settings import EvaluationSettings
from alto.lora import read_saved_adapter
from alto.records import FinalistScore

__all__ = ["FinalistJudge"]


class FinalistJudge:
    """Generates answers of several adapters of one base to the same questions, in one batch.

    Args:
        rows: Rows whose reply ends in ``#### N`` are used.
        backbone: The base; no job trains on it while they are judged.
        model: Its name, for messages.

    Raises:
        DataError: No row has a final answer, or one has no prompt.
    """

    def __init__(self, rows: Sequence[Conversation | Pair], backbone: Backbone, model: str) -> None:
        answered = [row for row in rows if not isinstance(row, Pair) and has_final_answers([row])]
        if not answered:
            raise DataError(
                f"select_by eval_accuracy: expected validation rows whose replies end in a line '#### N', found none "
                f"of {len(rows)}; add final answers, or remove select_by"
            )
        try:
            self._questions = make_questions(answered, backbone.tokenizer)
            self._prompts = [question.prompt_ids for question in self._questions]
            check_prompts(self._prompts, max_positions(backbone))
        except DataError as error:
            raise DataError(
                f"select_by eval_accuracy: of the validation rows that end in '#### N', {error}; or remove select_by"
            ) from error
        self._backbone = backbone
        self._model = model

    def __call__(self, finalists: Mapping[str, Path], on_turn: Callable[[], None]) -> list[FinalistScore]:
        """Number of right answers of each of ``finalists``, in their order.

        Args:
            finalists: Adapter folders by job.
            on_turn: Called after every token; what it raises ends the judging.
        """
        adapters = [read_saved_adapter(folder) for folder in finalists.values()]
        settings = EvaluationSettings()
        with loaded_adapters(self._backbone, adapters, self._model) as served:
            texts = complete(
                self._backbone,
                served,
                self._prompts,
                max_new_tokens=settings.max_new_tokens,
                batch_size=settings.batch_size,
                on_done=lambda _: on_turn(),
            )
        scores = []
        for job, of_job in zip(finalists, texts, strict=True):
            judged = judge_texts(self._questions, of_job, self._backbone.tokenizer, weights=job)
            num_correct = sum(prediction.correct for prediction in judged)
            scores.append(FinalistScore(job=job, num_correct=num_correct, num_questions=len(judged)))
        return scores
