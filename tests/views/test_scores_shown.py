"""Scores of answers in the job table and the report."""

from __future__ import annotations

import io

import pytest
from journals import entries
from rich.console import Console

from alto.records import FinalistScore
from alto.report.report import write_report
from alto.runs import RunHistory
from alto.views.tables import job_table
from alto.views.terminal import final_summary
from alto.views.wording import format_score


@pytest.mark.parametrize(
    ("score", "text"),
    [
        (None, "–"),
        (FinalistScore(job="a", num_questions=8, num_correct=4), "50 %"),
        (FinalistScore(job="a", num_questions=8, num_correct=4, mean=0.5, interval=(0.2, 0.8)), "50 % (20–80 %)"),
        (FinalistScore(job="a", num_questions=8, mean=0.7134), "0.713"),
        (FinalistScore(job="a", num_questions=8, mean=-1.5, interval=(-2.0, -1.0)), "-1.5 (-2–-1)"),
    ],
)
def test_a_score_in_a_narrow_column(score: FinalistScore | None, text: str) -> None:
    assert format_score(score) == text


@pytest.mark.parametrize("is_scored", [True, False])
def test_jobs_that_were_scored_have_a_column(is_scored: bool, judged_run, small_run, write_run) -> None:
    events = judged_run if is_scored else small_run
    table = job_table(RunHistory.of(entries(events)))
    assert table.has_scores == is_scored
    scored = {row.job: row.score for row in table.rows if row.raw_score is not None}
    assert scored == ({"d": "12 %", "c": "62 %"} if is_scored else {})
    page = write_report(write_run(events)).read_text(encoding="utf-8")
    assert (">score<" in page) == is_scored
    console = Console(width=160, record=True, file=io.StringIO())
    history = RunHistory.of(entries(events))
    console.print(final_summary(history))
    assert ("62 %" in console.export_text()) == is_scored
