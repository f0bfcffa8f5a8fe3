"""The scorer that a task or an evaluation names, and the rows that it can score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alto.data import ChatTemplate, Conversation, LabelledText, Pair
from alto.errors import DataError
from alto.evaluation.answers import reply_position
from alto.evaluation.http_scorer import HttpScorer
from alto.evaluation.matching import check_keys, matching_of, tool_calls_in
from alto.evaluation.prompts import reply_text
from alto.evaluation.python_scorer import PythonScorer
from alto.evaluation.scorers import Scorer
from alto.spec import Scoring

__all__ = ["check_key_names", "check_references", "needed_of", "scorable", "scorer_of"]


def scorer_of(scoring: Scoring) -> Scorer:
    """Return the scorer of generated texts that ``scoring`` names.

    Raises:
        SpecError: The Python function does not exist, or the request headers are not set.
    """
    matching = matching_of(scoring)
    if matching is not None:
        return matching
    if scoring.scorer == "python":
        assert scoring.function is not None
        return PythonScorer(scoring.function, scoring.timeout_s)
    assert scoring.scorer == "http", "multiple choice generates no texts"
    return HttpScorer(scoring)


def needed_of(scoring: Scoring) -> str:
    """Return the property that a row's reply needs to be scored; it completes the phrase "replies that ..."."""
    matching = matching_of(scoring)
    return "are text after a prompt" if matching is None else matching.needed


def scorable(rows: Sequence[Conversation | Pair | LabelledText], scoring: Scoring) -> list[Conversation]:
    """Return the rows that ``scoring`` can score."""
    matching = matching_of(scoring)
    found = []
    for row in rows:
        reference = "" if isinstance(row, Pair | LabelledText) else _reference(row, scoring)
        if reference and (matching is None or matching.read(reference) is not None):
            assert not isinstance(row, Pair | LabelledText)
            found.append(row)
    return found


def check_key_names(rows: Sequence[Conversation | Pair | LabelledText], scoring: Scoring) -> None:
    """Check that every key to compare is in at least one reply, if any replies have JSON values.

    Raises:
        DataError: A key is in no reply.
    """
    if scoring.keys and (with_values := scorable(rows, Scoring(scorer="json"))):
        check_keys(scoring, [_reference(row, scoring) for row in with_values])


def check_references(rows: Sequence[Conversation], scoring: Scoring, tokenizer: Any) -> None:
    """Check that correct answers to ``rows``, which can be scored, would be recognised.

    Raises:
        DataError: A key to compare is in no row, or the chat template writes tool calls in a form that ALTO cannot
            read.
    """
    check_keys(scoring, [_reference(row, scoring) for row in rows])
    if scoring.scorer != "tool_call":
        return
    for row in rows:
        position = reply_position(row)
        if position is None or not row[position].other_keys().get("tool_calls"):
            continue
        wanted = tool_calls_in(_reference(row, scoring))
        written = ChatTemplate(tokenizer).text(row[: position + 1], open_turn=False)
        if tool_calls_in(written)[-len(wanted) :] != wanted:
            raise DataError(
                "expected a chat template that writes tool calls as JSON objects with name and arguments, found "
                f"{written.strip()[-200:]!r}; use scorer python with a function that reads this format"
            )
        return


def _reference(row: Conversation, scoring: Scoring) -> str:
    """Return the reply of ``row`` with which answers are compared; empty if there is none."""
    position = reply_position(row)
    if position is None:
        return ""
    # The other scorers compare texts, in which the form of a tool call depends on the chat template.
    reads_calls = scoring.scorer in ("tool_call", "python", "http")
    return reply_text(row[position]) if reads_calls or row[position].content.strip() else ""
