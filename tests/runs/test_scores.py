"""Scores of answers in journals: as they are written now, and as version 0.1 wrote them."""

from __future__ import annotations

from typing import Any

import pytest

from alto.records import FinalistScore
from alto.runs import RunHistory
from alto.runs.events import FinalistsJudged, JournalEntry, RungScored, decode, encode

OLD = {
    "seq": 7,
    "time": 5.0,
    "event": "finalists_judged",
    "scores": [{"job": "a", "num_correct": 1, "num_questions": 8}, {"job": "b", "num_correct": 5, "num_questions": 8}],
}
SCORE = FinalistScore(job="a", num_questions=3, mean=0.5, interval=(0.25, 0.75), rows=(0.25, 0.5, 0.75))


def test_a_line_of_version_0_1_is_read_and_written_back() -> None:
    entry = decode(OLD)
    assert isinstance(entry.event, FinalistsJudged)
    assert [score.score for score in entry.event.scores] == [0.125, 0.625]
    assert (entry.event.scorer, entry.event.failure, entry.unknown) == ("", "", {})
    assert encode(entry) == OLD
    history = RunHistory.of([entry])
    assert (history.scorer, history.scorer_failure, len(history.finalists)) == ("eval_accuracy", "", 2)


@pytest.mark.parametrize(
    "event",
    [
        FinalistsJudged(scores=(SCORE,), scorer="python"),
        FinalistsJudged(scores=(), scorer="http", failure="https://judge.example: status 500, 3 times"),
        RungScored(rung=1, progress=0.2, scores=(SCORE,), scorer="python"),
        RungScored(rung=0, progress=0.1, scores=(), scorer="python", failure="score: row 1: it raised KeyError"),
    ],
)
def test_an_event_is_written_and_read_back(event: Any) -> None:
    entry = JournalEntry(seq=1, time=2.0, event=event)
    again = decode(encode(entry))
    assert again == entry
    history = RunHistory.of([again])
    if isinstance(event, RungScored):
        assert history.rung_scores == [event]
    else:
        assert (history.finalists, history.scorer, history.scorer_failure) == (
            event.scores,
            event.scorer,
            event.failure,
        )
