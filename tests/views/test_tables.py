"""Tables of jobs in the terminal, and scores of answers in them and in the report."""

from __future__ import annotations

import io
import math

import pytest
from journals import entries
from rich.console import Console

from alto.early_exit.patterns import Divergence, OverfittingGap, OverfittingUpturn, judge_step_loss
from alto.early_exit.policy import select
from alto.records import Candidate, FinalistScore, LossPoint
from alto.report.report import write_report
from alto.runs import JobHistory, RunHistory, Stage
from alto.runs.progress import exit_totals
from alto.views.tables import explain_exit, job_table
from alto.views.terminal import final_summary
from alto.views.wording import format_score


def exited(reason, evidence, **fields) -> JobHistory:
    return JobHistory(job="a", position=0, stage=Stage.EXITED, exit_reason=reason, exit_evidence=evidence, **fields)


def points(train, validation) -> list[LossPoint]:
    return [
        LossPoint(job="a", step=step, total_steps=20, train_ema=ema, validation_loss=loss)
        for step, (ema, loss) in enumerate(zip(train, validation, strict=True), start=1)
    ]


def test_columns_are_the_keys_that_vary(small_run):
    table = job_table(RunHistory.of(entries(small_run)))
    assert table.columns == ("lr", "r")
    assert [(row.job, row.settings) for row in table.rows] == [
        ("d", ("2e-4", "8")), ("c", ("2e-4", "4")), ("b", ("1e-5", "4")), ("a", ("0.01", "4")),
    ]  # fmt: skip
    assert [row.is_best for row in table.rows] == [True, False, False, False]
    assert table.rows[0].label == "lr 2e-4 · r 8"


def test_columns_of_metrics_are_those_of_preferences_at_the_best_of_every_job(preference_run):
    table = job_table(RunHistory.of(entries(preference_run)))
    assert table.metrics == ("reward_accuracy", "reward_margin")
    assert [(row.job, row.metrics) for row in table.rows] == [
        ("c", (0.75, 0.4)), ("b", (0.75, 0.38)), ("a", (0.61, 0.6)),
    ]  # fmt: skip


def test_a_metric_of_a_package_s_method_has_a_column_where_the_task_chooses_by_it(preference_run):
    preference_run[0]["metric"] = "win_rate"
    for event in preference_run:
        if "metrics" in event:
            event["metrics"] = {"win_rate": 0.5, "entropy": 1.0}
    assert job_table(RunHistory.of(entries(preference_run))).metrics == ("win_rate",)


def test_there_are_no_such_columns_where_nothing_was_measured(small_run):
    assert job_table(RunHistory.of(entries(small_run))).metrics == ()


def test_rows_explain_exits(small_run):
    reasons = {row.job: row.explanation for row in job_table(RunHistory.of(entries(small_run))).rows}
    assert reasons == {
        "a": "smoothed training loss became infinite",
        "b": "rank 3 of 3 at 10 %: 2 kept",
        "c": "validation 2.5000 was 25 % above train 2.0000 twice in a row (allowed: 10 %)",
        "d": "chosen by validation loss",
    }
    small_run[-1:] = []  # the result
    assert job_table(RunHistory.of(entries(small_run))).rows[0].explanation == ""


def test_totals_add_up(small_run):
    history = RunHistory.of(entries(small_run))
    totals = exit_totals(history)
    assert {total.outcome: total.samples_saved for total in totals} == {
        "diverging": 900, "underperforming": 900, "overfitting": 500, "completed": 0,
    }  # fmt: skip
    assert totals[-1].outcome == "completed"
    assert sum(total.samples_trained for total in totals) == history.samples_trained
    assert sum(total.share for total in totals) == pytest.approx(history.saved_share)


def test_every_rule_of_early_exit_is_explained_in_words():
    """The real rules make the evidence, so that a renamed number cannot silently fall back to ``key value``."""
    falling = [3.0, 2.5, 2.2, 2.0, 1.9]
    decisions = [
        Divergence().judge(points([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])),
        OverfittingGap().judge(points([2.0, 2.0], [2.5, 2.5])),
        OverfittingUpturn().judge(points([1.0] * 7, [*falling, 4.0, 4.5])),
        judge_step_loss("a", 3, math.nan),
        select(
            1,
            [Candidate(job=name, step=1, validation_loss=loss) for name, loss in (("a", 2.0), ("b", 1.0))],
        ).dropped[0],
    ]
    sentences = [explain_exit(exited(found.reason, found.evidence), rung_progress=0.025) for found in decisions]
    assert sentences == [
        "training loss rose by 1 and validation loss by 1 per evaluation twice in a row (allowed: 0.001)",
        "validation 2.5000 was 25 % above train 2.0000 twice in a row (allowed: 10 %)",
        "validation 4.5000 was 2.6 above its best 1.9000 twice in a row (allowed: "
        f"{decisions[2].evidence['margin']:.2g})",
        "training loss became not a number",
        "rank 2 of 2 at 2.5 %: 1 kept",
    ]


@pytest.mark.parametrize(
    ("reason", "evidence", "expected"),
    [
        ("overfitting", {"curvature": 0.5, "limit": 2}, "curvature 0.5, limit 2"),
        ("failed", {"error": "out of\x1b[2J memory"}, "error out of[2J memory"),
        ("stopped", {}, "stopped by the user"),
        ("a new reason", {}, "a new reason"),
        ("diverging", {"validation_loss": "NaN"}, "validation_loss NaN"),
    ],
)
def test_unknown_evidence_is_listed(reason, evidence, expected):
    assert explain_exit(exited(reason, evidence)) == expected


def test_a_rank_without_its_rung_is_shown_at_the_job_s_own_progress():
    evidence = {"rank": 2.0, "num_competing": 4.0, "num_kept": 1.0}
    assert explain_exit(exited("underperforming", evidence, step=5, total_steps=100)) == "rank 2 of 4 at 5 %: 1 kept"
    late = {**evidence, "progress": 0.025}
    assert explain_exit(exited("underperforming", late, step=5, total_steps=100)) == "rank 2 of 4 at 2.5 %: 1 kept"


def test_where_seeds_are_repeated_ranks_are_those_of_configurations():
    evidence = {"rank": 2.0, "num_competing": 4.0, "num_kept": 1.0}
    job = exited("underperforming", evidence, step=5, total_steps=100)
    assert explain_exit(job, has_repetitions=True) == "rank 2 of 4 configurations at 5 %: 1 kept"


def test_the_table_of_a_run_that_repeats_seeds_counts_configurations(small_run):
    for job in small_run[0]["jobs"]:
        job["configuration"] = f"of {job['job']}"
    rows = {row.job: row.explanation for row in job_table(RunHistory.of(entries(small_run))).rows}
    assert rows["b"] == "rank 3 of 3 configurations at 10 %: 2 kept"


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
