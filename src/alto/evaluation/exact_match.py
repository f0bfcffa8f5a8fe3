"""Exact match: whether a model's greedy answer ends in the reference's final answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alto.data import Conversation, LabelledText, Pair
from alto.evaluation.answers import final_answer, reference_answers
from alto.evaluation.prompts import prompts_of
from alto.records import Prediction

__all__ = ["Question", "judge_texts", "make_questions", "open_questions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One row: the prompt's token ids, the reference, and the reference's final answer.

    Attributes:
        prompt_ids: Token ids of the prompt.
        reference: Text of the reference reply.
        answer: Final answer of the reference; None where answers are not compared with it.
    """

    prompt_ids: tuple[int, ...]
    reference: str
    answer: str | None


def make_questions(conversations: Sequence[Conversation], tokenizer: Any) -> list[Question]:
    """Zero-shot prompts: every row up to its last reply, without examples before it.

    Raises:
        DataError: A row has no final answer, or no prompt.
    """
    answers = reference_answers(conversations)
    return [
        Question(prompt_ids=prompt.ids, reference=prompt.reference, answer=answer)
        for prompt, answer in zip(prompts_of(conversations, tokenizer), answers, strict=True)
    ]


def open_questions(rows: Sequence[Conversation | Pair | LabelledText], tokenizer: Any) -> list[Question]:
    """The same of rows whose references need no final answer.

    Raises:
        DataError: A row has no prompt, or no reply in text.
    """
    return [
        Question(prompt_ids=prompt.ids, reference=prompt.reference, answer=None)
        for prompt in prompts_of(rows, tokenizer)
    ]


def judge_texts(
    questions: Sequence[Question], texts: Sequence[Sequence[int]], tokenizer: Any, *, weights: str
) -> list[Prediction]:
    """Compare the answers of a model with the references, where these have final answers.

    Args:
        questions: The questions.
        texts: Token ids of the answer to every question.
        tokenizer: Decodes the texts.
        weights: Name of the adapter, or of the base model, that wrote them.
    """
    predictions = []
    for row, (question, text) in enumerate(zip(questions, texts, strict=True), start=1):
        generated = tokenizer.decode(text, skip_special_tokens=True)
        extracted = None if question.answer is None else final_answer(generated)
        predictions.append(
            Prediction(
                weights=weights,
                row=row,
                prompt=tokenizer.decode(question.prompt_ids),
                reference=question.reference,
                generated=generated,
                extracted=extracted,
                correct=None if question.answer is None else extracted == question.answer,
            )
        )
    return predictions
