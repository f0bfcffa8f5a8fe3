"""The winner's lead: paired over validation rows, with the weights of the loss."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from alto.records import FinalistScore
from alto.records.evaluation import student_quantile
from alto.runs import RunHistory
from alto.runs.events import FinalistsJudged, JobDescription, JobEvaluated, JournalEntry, TaskCompleted, TaskStarted
from alto.runs.lead import lead_of_winner
from alto.views import choice_notes


def started(jobs: Sequence[str], **facts: Any) -> TaskStarted:
    known = {
        **{"task": "t", "model": "m", "base_model": "m", "dataset": "d", "method": "sft", "metric": "loss"},
        **{"num_train": 9, "num_validation": 4, "data": {}, "max_slots": 2, "early_exit": {}, "device": "cpu"},
        **{"num_ranks": 1, "versions": {}},
    }
    described = tuple(JobDescription(job=job, config={}, total_steps=10, samples_budgeted=10) for job in jobs)
    return TaskStarted(**(known | facts), jobs=described)


def evaluated(job: str, rows: Sequence[float], weights: Sequence[float], step: int = 5, **facts: Any) -> JobEvaluated:
    mean = sum(a * b for a, b in zip(rows, weights, strict=True)) / sum(weights)
    known = {"total_steps": 10, "train_ema": 1.0, "validation_loss": mean, "is_best": True, "loss_rows": tuple(rows)}
    return JobEvaluated(job=job, step=step, **(known | facts))


def history_of(*events: Any) -> RunHistory:
    best = min((event for event in events if isinstance(event, JobEvaluated)), key=lambda event: event.validation_loss)
    done = TaskCompleted(
        best_job=best.job, best_validation_loss=best.validation_loss, samples_trained=1, samples_budgeted=1
    )
    return RunHistory.of(
        [JournalEntry(seq=index, time=float(index), event=event) for index, event in enumerate((*events, done))]
    )


WEIGHTS = (1.0, 5.0, 2.0, 9.0)
FIRST = (2.0, 1.0, 3.0, 1.5)


def test_equal_weights_give_the_paired_interval_of_student() -> None:
    other = (2.1, 1.3, 3.0, 1.9)
    lead = lead_of_winner(history_of(started("ab"), evaluated("a", FIRST, [1.0] * 4), evaluated("b", other, [1.0] * 4)))
    differences = [b - a for a, b in zip(FIRST, other, strict=True)]
    half = student_quantile(3) * statistics.stdev(differences) / 2
    mean = statistics.fmean(differences)
    assert lead is not None
    assert (lead.runner_up, lead.metric, lead.num_rows) == ("b", "loss", 4)
    assert lead.difference == pytest.approx(mean)
    assert lead.interval == pytest.approx((mean - half, mean + half))


def test_rows_are_weighted_as_in_the_loss() -> None:
    """The rows' difference equals the losses' difference, and a row without weight does not count."""
    other = (9.0, 1.1, 3.1, 1.7)
    history = history_of(
        started("ab", validation_weights=WEIGHTS), evaluated("a", FIRST, WEIGHTS), evaluated("b", other, WEIGHTS)
    )
    lead = lead_of_winner(history)
    losses = [history.jobs[job].best_validation_loss for job in "ab"]
    assert lead is not None
    assert lead.difference == pytest.approx(losses[1] - losses[0])
    unweighted = lead_of_winner(
        history_of(started("ab"), evaluated("a", FIRST, WEIGHTS), evaluated("b", other, WEIGHTS))
    )
    assert unweighted is not None
    assert unweighted.difference != pytest.approx(lead.difference)


def test_the_difference_is_that_of_the_losses_though_rows_are_rounded() -> None:
    """A journal has four significant digits of a row's loss."""
    rows = {"a": (2.00049, 1.00049, 3.00049, 1.50049), "b": (2.10051, 1.30051, 3.00151, 1.90051)}
    events = [started("ab", validation_weights=WEIGHTS)]
    for job, exact in rows.items():
        event = evaluated(job, exact, WEIGHTS)
        events.append(replace(event, loss_rows=tuple(float(f"{value:.4g}") for value in exact)))
    history = history_of(*events)
    lead = lead_of_winner(history)
    losses = [history.jobs[job].best_validation_loss for job in "ab"]
    assert lead is not None
    assert lead.difference == losses[1] - losses[0]
    assert sum(lead.interval) / 2 == pytest.approx(lead.difference, rel=1e-12)
    shown = [history.jobs[job].best_loss_rows for job in "ab"]
    of_rows = sum(w * (b - a) for w, a, b in zip(WEIGHTS, *shown, strict=True)) / sum(WEIGHTS)
    assert abs(of_rows - lead.difference) > 1e-4, "rounding has an effect"


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    """95 % of the intervals contain the known weighted mean, for rows with random weights and differences."""
    source = random.Random(3)
    held = 0
    for _ in range(400):
        weights = [source.choice([1.0, 4.0, 10.0]) for _ in range(60)]
        first = [source.uniform(1, 3) for _ in weights]
        second = [value + 0.3 + source.gauss(0, 0.5) for value in first]
        events = [started("ab", validation_weights=tuple(weights))]
        events += [evaluated("a", first, weights), evaluated("b", second, weights)]
        lead = lead_of_winner(history_of(*events))
        assert lead is not None
        sign = 1.0 if lead.runner_up == "b" else -1.0
        low, high = sorted(sign * end for end in lead.interval)
        held += low <= 0.3 <= high
    assert 0.90 <= held / 400 <= 0.985


def test_a_lead_within_noise_is_noted() -> None:
    close = (2.1, 0.9, 3.05, 1.5)
    note = choice_notes(history_of(started("ab"), evaluated("a", FIRST, [1.0] * 4), evaluated("b", close, [1.0] * 4)))
    assert [text.partition(":")[0] for text in note] == ["loss"]
    assert "4 validation rows cannot separate a from b: its loss is lower by" in note[0]
    longer = evaluated("a", FIRST, [1.0] * 4, step=10)
    note = choice_notes(history_of(started("ab"), longer, evaluated("b", close, [1.0] * 4)))
    assert "cannot separate a from b (ended at 50 % of its steps): its loss" in note[0]
    far = tuple(value + 1 + 0.01 * value for value in FIRST)
    assert (
        choice_notes(history_of(started("ab"), evaluated("a", FIRST, [1.0] * 4), evaluated("b", far, [1.0] * 4))) == ()
    )


def test_jobs_are_compared_by_their_best_evaluation() -> None:
    later = evaluated("b", (9.0,) * 4, [1.0] * 4, step=8, is_best=False)
    events: Sequence[Any] = [evaluated("a", FIRST, [1.0] * 4), evaluated("b", (2.2, 1.2, 3.2, 1.7), [1.0] * 4)]
    assert lead_of_winner(history_of(started("ab"), *events)) == lead_of_winner(
        history_of(started("ab"), *events, later)
    )


@pytest.mark.parametrize(
    "change",
    [{"loss_rows": ()}, {"loss_rows": (1.0, 2.0)}, {"loss_rows": (1.0, math.inf, 2.0, 1.0)}],
    ids=["none", "others", "infinite"],
)
def test_without_comparable_rows_there_is_no_interval(change: Mapping[str, Any]) -> None:
    other = replace(evaluated("b", (2.2, 1.2, 3.2, 1.7), [1.0] * 4), **change)
    assert lead_of_winner(history_of(started("ab"), evaluated("a", FIRST, [1.0] * 4), other)) is None


def test_a_single_job_has_no_lead() -> None:
    assert lead_of_winner(history_of(started("a"), evaluated("a", FIRST, [1.0] * 4))) is None


def test_answers_are_compared_where_they_chose() -> None:
    judged = FinalistsJudged(
        scores=(
            FinalistScore(job="a", num_questions=4, mean=0.75, rows=(1.0, 1.0, 1.0, 0.0)),
            FinalistScore(job="b", num_questions=4, mean=0.5, rows=(1.0, 0.0, 1.0, 0.0)),
        ),
        scorer="exact_match",
    )
    events = [evaluated("a", FIRST, [1.0] * 4), evaluated("b", (2.2, 1.2, 3.2, 1.7), [1.0] * 4)]
    lead = lead_of_winner(history_of(started("ab"), *events, judged))
    assert lead is not None
    assert (lead.metric, lead.difference, lead.num_rows) == ("exact_match", 0.25, 4)


def test_values_too_large_for_a_variance_give_no_interval() -> None:
    """A user's scorer may give any number; the result of a finished run must still be readable."""
    judged = FinalistsJudged(
        scores=(
            FinalistScore(job="a", num_questions=2, mean=1e200, rows=(2e200, 1.0)),
            FinalistScore(job="b", num_questions=2, mean=0.5, rows=(1.0, 0.0)),
        ),
        scorer="python",
    )
    events = [evaluated("a", FIRST, [1.0] * 4), evaluated("b", (2.2, 1.2, 3.2, 1.7), [1.0] * 4)]
    assert lead_of_winner(history_of(started("ab"), *events, judged)) is None


def test_by_a_metric_jobs_of_any_scale_of_loss_are_compared_and_by_the_loss_those_of_one() -> None:
    """Accuracies of jobs with other ``beta`` are comparable, their losses are not."""
    by_metric = started("abc", method="dpo", metric="reward_accuracy")
    betas = {"a": 0.1, "b": 0.5, "c": 0.1}
    by_metric = replace(by_metric, jobs=tuple(replace(job, config={"beta": betas[job.job]}) for job in by_metric.jobs))
    right = {"a": (1.0, 1.0, 1.0, 0.0), "b": (1.0, 1.0, 0.0, 0.0), "c": (1.0, 0.0, 0.0, 0.0)}
    losses = {"a": 1.0, "b": 1.1, "c": 1.2}
    events = [
        evaluated(job, (losses[job],) * 4, [1.0] * 4, metric_rows=rows, metrics={"reward_accuracy": sum(rows) / 4.0})
        for job, rows in right.items()
    ]
    lead = lead_of_winner(history_of(by_metric, *events))
    assert lead is not None
    assert (lead.runner_up, lead.metric, lead.difference) == ("b", "reward_accuracy", 0.25)
    lead = lead_of_winner(history_of(replace(by_metric, metric="loss"), *events))
    assert lead is not None
    assert (lead.runner_up, lead.metric) == ("c", "loss")
    assert lead.difference == pytest.approx(0.2)


def test_the_best_of_the_other_finalists_is_the_next_best_one() -> None:
    scores = {"a": (1.0, 1.0, 1.0), "b": (1.0, 0.0, 0.0), "c": (1.0, 1.0, 0.0)}
    judged = FinalistsJudged(
        scores=tuple(
            FinalistScore(job=job, num_questions=3, mean=statistics.fmean(rows), rows=rows)
            for job, rows in scores.items()
        ),
        scorer="exact_match",
    )
    losses = {"a": FIRST, "b": (2.2, 1.2, 3.2, 1.7), "c": (2.3, 1.3, 3.3, 1.8)}
    events = [evaluated(job, rows, [1.0] * 4) for job, rows in losses.items()]
    lead = lead_of_winner(history_of(started("abc"), *events, judged))
    assert lead is not None
    assert lead.runner_up == "c"
    without_winner = replace(judged, scores=judged.scores[1:])
    assert lead_of_winner(history_of(started("abc"), *events, without_winner)) is None


def test_a_run_that_has_not_ended_has_no_lead() -> None:
    events = [started("ab"), evaluated("a", FIRST, [1.0] * 4), evaluated("b", (9.0,) * 4, [1.0] * 4)]
    entries = [JournalEntry(seq=index, time=float(index), event=event) for index, event in enumerate(events)]
    assert RunHistory.of(entries).best is not None
    assert lead_of_winner(RunHistory.of(entries)) is None


def test_one_row_and_weights_of_other_rows_give_no_interval() -> None:
    one = [evaluated("a", (1.0,), [1.0]), evaluated("b", (2.0,), [1.0])]
    assert lead_of_winner(history_of(started("ab"), *one)) is None
    two = [evaluated("a", FIRST, [1.0] * 4), evaluated("b", (9.0,) * 4, [1.0] * 4)]
    assert lead_of_winner(history_of(started("ab", validation_weights=(1.0, 2.0)), *two)) is None


def test_a_job_without_a_finite_loss_is_not_the_next_best_one() -> None:
    rows = {"a": (1.0, 1.0), "b": (1.0, 0.0), "c": (0.0, 0.0)}
    events = [
        evaluated(job, (1.0, 2.0), [1.0] * 2, metric_rows=right, metrics={"accuracy": statistics.fmean(right)})
        for job, right in rows.items()
    ]
    events[1] = replace(events[1], validation_loss=math.inf)
    by_accuracy = {"method": "classification", "metric": "accuracy"}
    lead = lead_of_winner(history_of(started("abc", **by_accuracy), *events))
    assert lead is not None
    assert lead.runner_up == "c"
    assert lead_of_winner(history_of(started("ab", **by_accuracy), *events[:2])) is None


def test_equal_jobs_are_within_noise_and_a_job_that_is_behind_for_certain_is_not() -> None:
    lead = lead_of_winner(history_of(started("ab"), *(evaluated(job, FIRST, [1.0] * 4) for job in "ab")))
    assert lead is not None
    assert (lead.difference, lead.interval) == (0.0, (0.0, 0.0))
    assert lead.is_within_noise
    assert not replace(lead, difference=-2.0, interval=(-3.0, -1.0)).is_within_noise


def test_only_a_lead_by_the_loss_is_a_note_of_its_own() -> None:
    """For a metric the selection itself lists the jobs within noise."""
    right = {"a": (1.0, 1.0, 1.0, 0.0), "b": (1.0, 1.0, 0.0, 0.0)}
    events = [
        evaluated(job, FIRST, [1.0] * 4, metric_rows=rows, metrics={"accuracy": sum(rows) / 4})
        for job, rows in right.items()
    ]
    history = history_of(started("ab", method="classification", metric="accuracy"), *events)
    lead = lead_of_winner(history)
    assert lead is not None
    assert lead.is_within_noise
    assert choice_notes(history) == ()


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (10, 2.228), (30, 2.042), (120, 1.980)],
)
def test_the_quantiles_are_those_of_a_table_of_student_s_distribution(degrees: int, quantile: float) -> None:
    assert student_quantile(degrees) == pytest.approx(quantile, rel=0.02)
