"""Exact match: whether a model's greedy answer ends in the reference's final answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alto.data import Conversation, encode_prompt
from alto.errors import DataError
from alto.evaluation.answers import final_answer, reference_answers, reply_position
from alto.records import Prediction

__all__ = ["Question", "judge_texts", "make_prompts", "make_questions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One row: the prompt's token ids, the reference, and the reference's final answer.

    Attributes:
        prompt_ids: Token ids of the prompt.
        reference: Text of the reference reply.
        answer: Final answer of the reference.
    """

    prompt_ids: tuple[int, ...]
    reference: str
    answer: str


def make_questions(conversations: Sequence[Conversation], tokenizer: Any) -> list[Question]:
    """Zero-shot prompts: every row up to its last reply, without examples before it.

    Raises:
        DataError: A row has no final answer, or no prompt.
    """
    answers = reference_answers(conversations)
    prompts = make_prompts(conversations, tokenizer)
    return [
        Question(prompt_ids=ids, reference=reference, answer=answer)
        for (ids, reference), answer in zip(prompts, answers, strict=True)
    ]


def make_prompts(conversations: Sequence[Conversation], tokenizer: Any) -> list[tuple[tuple[int, ...], str]]:
    """Of every row with a reply, the token ids up to its last reply, and the text of that reply.

    Raises:
        DataError: A row has no prompt.
    """
    prompts = []
    for number, conversation in enumerate(conversations, start=1):
        position = reply_position(conversation)
        assert position is not None, "the row has a reply"
        try:
            ids = encode_prompt(conversation[:position], tokenizer)
        except DataError as error:
            raise DataError(f"row {number}: {error}") from error
        prompts.append((tuple(ids), conversation[position].content))
    return prompts


def judge_texts(
    questions: Sequence[Question], texts: Sequence[Sequence[int]], tokenizer: Any, *, weights: str
) -> list[Prediction]:
    """Compare the answers of a model with the references.

    Args:
        questions: The questions.
        texts: Token ids of the answer to every question.
        tokenizer: Decodes the texts.
        weights: Name of the adapter, or of the base model, that wrote them.
    """
    predictions = []
    for question, text in zip(questions, texts, strict=True):
        generated = tokenizer.decode(text, skip_special_tokens=True)
        extracted = final_answer(generated)
        predictions.append(
            Prediction(
                weights=weights,
                prompt=tokenizer.decode(question.prompt_ids),
                reference=question.reference,
                generated=generated,
                extracted=extracted,
                correct=extracted == question.answer,
            )
        )
    return predictions
