"""Jobs chosen by a metric or by scores of answers: the best, those kept at a rung, the winner."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journals import entries

from alto.early_exit import (
    Policy,
    RecordedJob,
    Recording,
    Selection,
    audit,
    choose,
    interval_of,
    policy,
    policy_from,
    replay,
    scores_of,
    selection_of,
)
from alto.errors import RunError
from alto.records import Candidate, ExitReason, FinalistScore, Judgement, LossPoint, Rung, RungResult
from alto.spec.early_exit import EarlyExit
from alto.spec.scoring import score_of

HALF = Rung(progress=0.1, keep=0.5)
LEAST = score_of("x", {"x": math.nan})


def select(rung: Rung, candidates: list[Candidate]) -> RungResult:
    return policy.select(math.ceil(rung.keep * len(candidates)), candidates)


def candidate(job: str, score: float, loss: float, *, is_training: bool = True) -> Candidate:
    return Candidate(job=job, step=5, validation_loss=loss, score=score, is_training=is_training)


@pytest.mark.parametrize(
    ("case", "candidates", "kept"),
    [
        ("more is better, whatever the loss", [("a", 0.6, 0.1), ("b", 0.7, 9.0)], ["b"]),
        ("ties by the loss", [("a", 0.7, 0.6), ("b", 0.7, 0.5)], ["b"]),
        ("ties of both by job id", [("b", 0.7, 0.5), ("a", 0.7, 0.5)], ["a"]),
        ("a score that was not finite is the least", [("a", LEAST, 0.1), ("b", -5.0, 0.5)], ["b"]),
        ("where no score was finite the loss decides", [("a", LEAST, 0.6), ("b", LEAST, 0.5)], ["b"]),
        ("a loss that is not finite is last", [("a", 0.9, math.nan), ("b", 0.1, 0.5)], ["b"]),
        ("a negative margin is less than none", [("a", -0.1, 0.1), ("b", 0.0, 0.7)], ["b"]),
    ],
)
def test_who_is_kept_at_a_rung(case: str, candidates: list[tuple[str, float, float]], kept: list[str]) -> None:
    assert list(select(HALF, [candidate(*one) for one in candidates]).kept) == kept


def test_evidence_has_the_scores_that_decided() -> None:
    (verdict,) = select(HALF, [candidate("a", 0.6, 0.1), candidate("b", 0.7, 0.9)]).dropped
    assert (verdict.job, verdict.reason) == ("a", ExitReason.UNDERPERFORMING)
    assert verdict.evidence == {
        "rank": 2.0, "validation_loss": 0.1, "score": 0.6, "num_competing": 2.0, "num_kept": 1.0, "cutoff_loss": 0.9,
        "cutoff_score": 0.7,
    }  # fmt: skip


def train_to(selection: Selection, job: str, step: int, loss: float, score: float) -> None:
    done = selection.history(job)[-1].step if selection.history(job) else 0
    selection.observe_losses(job, done + 1, [1.0] * (step - done))
    selection.observe(job, step, loss, score)


def test_a_race_from_start_to_end() -> None:
    selection = Selection(Policy(rungs=(HALF,)), ema_alpha=1.0, total_steps=dict.fromkeys("abcd", 10))
    for job, loss, score in (("a", 0.5, 0.5), ("b", 0.6, 0.7), ("c", 0.7, 0.7), ("d", 0.1, 0.6)):
        train_to(selection, job, 1, loss, score)
    assert selection.select().kept == ("b", "c")
    train_to(selection, "b", 5, 0.4, 0.65)
    assert selection.best("b").step == 1, "its loss fell, but its accuracy did too"
    train_to(selection, "b", 10, 0.55, 0.7)
    assert selection.best("b").step == 10, "the same accuracy, with a lower loss"
    train_to(selection, "c", 10, 0.55, 0.7)
    assert selection.winner() == selection.best("b"), "the first of equal jobs"
    assert selection.training == ()


def test_the_last_evaluation_of_equals_does_not_replace_the_first() -> None:
    selection = Selection(Policy(), ema_alpha=1.0, total_steps={"a": 10})
    for step in (2, 4, 6):
        train_to(selection, "a", step, 0.5, 0.7)
    assert selection.best("a").step == 2


def test_no_job_is_certain_of_a_place_that_others_may_take_by_their_score() -> None:
    selection = Selection(
        Policy(rungs=(HALF, Rung(progress=0.5, keep=0.5))), ema_alpha=1.0, total_steps=dict.fromkeys("abcd", 10)
    )
    train_to(selection, "a", 1, 1e-9, 1.0)
    train_to(selection, "b", 1, 0.1, 0.9)
    assert selection.rungs.certain_to_be_kept() == frozenset()
    train_to(selection, "c", 1, 0.2, 0.8)
    assert selection.rungs.certain_to_be_kept() == frozenset("a")


@given(
    st.dictionaries(
        st.sampled_from("abcdefgh"), st.tuples(st.sampled_from([0.5, 0.6, LEAST]), st.floats(0, 3)), min_size=1
    ),
    st.randoms(use_true_random=False),
)
def test_the_order_of_telling_does_not_matter(worth: dict[str, tuple[float, float]], draw: random.Random) -> None:
    candidates = [candidate(job, score, loss) for job, (score, loss) in worth.items()]
    shuffled = draw.sample(candidates, len(candidates))
    assert select(HALF, shuffled) == select(HALF, candidates)


# -- journals and recordings --------------------------------------------------------------------------------------


def journal(metric: dict[str, str], evaluations: dict[str, list[tuple[int, float, dict[str, Any]]]]) -> list[dict]:
    """Return an executor's journal of jobs of ten steps without early exit."""
    early_exit = EarlyExit(enabled=False).resolved().model_dump()
    config = {"per_device_train_batch_size": 1}
    jobs = [{"job": job, "config": config, "total_steps": 10, "samples_budgeted": 10} for job in evaluations]
    events: list[dict[str, Any]] = [
        {
            "event": "task_started", "task": "t", "num_train": 10, "num_validation": 2, "early_exit": early_exit,
            "jobs": jobs, **metric,
        }
    ]  # fmt: skip
    for job, found in evaluations.items():
        done = 0
        for step, loss, metrics in found:
            events.append({"event": "train", "job": job, "first_step": done + 1, "losses": [0.6] * (step - done)})
            events.append({"event": "eval", "job": job, "step": step, "validation_loss": loss, **metrics})
            done = step
    return [{"seq": seq, **event} for seq, event in enumerate(events)]


def accuracy(value: float | str) -> dict[str, Any]:
    return {"metrics": {"reward_accuracy": value, "kl": 0.1}}


EVALUATIONS = {
    "a": [(5, 0.5, accuracy(0.6)), (10, 0.4, accuracy(0.7))],
    "b": [(5, 0.6, accuracy(0.8)), (10, 0.3, accuracy("nan"))],
}
BY_ACCURACY = {"metric": "reward_accuracy"}


@pytest.mark.parametrize(
    ("metric", "winner", "best_steps"),
    [
        (BY_ACCURACY, ("b", 5), {"a": 10, "b": 5}),
        ({"metric": "loss"}, ("b", 10), {"a": 10, "b": 10}),
        ({}, ("b", 10), {"a": 10, "b": 10}),
    ],
)
def test_a_journal_tells_the_race_again(
    metric: dict[str, str], winner: tuple[str, int], best_steps: dict[str, int]
) -> None:
    events = journal(metric, EVALUATIONS)
    selection = selection_of(entries(events))
    assert (selection.winner().job, selection.winner().step) == winner
    assert {job: selection.best(job).step for job in selection.jobs} == best_steps
    assert audit(entries(events)) == ()


def test_a_journal_from_before_there_were_metrics_is_read() -> None:
    events = journal({}, {"a": [(5, 0.5, {}), (10, 0.6, {})]})
    assert selection_of(entries(events)).best("a").step == 5
    assert Recording.from_journal(entries(events)).jobs[0].scores == ()


def test_an_evaluation_without_the_metric_is_another_version_s() -> None:
    with pytest.raises(RunError, match=r"event 2.*reward_accuracy"):
        selection_of(entries(journal(BY_ACCURACY, {"a": [(10, 0.5, {"metrics": {"kl": 0.1}})]})))


def test_a_recording_keeps_the_gains_and_replays_by_them(tmp_path) -> None:
    recording = Recording.from_journal(entries(journal(BY_ACCURACY, EVALUATIONS)))
    assert recording.jobs[1].scores == (0.8, LEAST)
    recording.write(tmp_path / "r.json.gz")
    # Its accuracy is NaN, which is unequal to itself but has the same repr.
    assert repr(Recording.read(tmp_path / "r.json.gz")) == repr(recording)
    everything = replay(recording, Policy(), 0.1)
    assert (everything.winner, everything.best_kept, everything.best_of_all, everything.regret) == ("b", 0.6, 0.6, 1.0)
    halved = replay(recording, policy_from(EarlyExit(rungs=[(0.5, 0.5)])), 0.1)
    assert halved.exits == {"a": (ExitReason.UNDERPERFORMING, 5)}


def test_a_recording_keeps_every_row_and_the_base_and_replays_as_the_journal_decided(tmp_path) -> None:
    """Job a is right on one more of 45 rows and has a worse loss: within noise, so b wins, live and in the replay."""
    rows = {"a": [float(row < 31) for row in range(45)], "b": [float(row < 30) for row in range(45)]}
    found = {
        job: [(10, loss, {**accuracy(sum(of) / 45), "metric_rows": of})]
        for (job, of), loss in zip(rows.items(), (0.9, 0.5), strict=True)
    }
    base = {"jobs": ["a", "b"], "validation_loss": 0.69, **accuracy(0.5), "metric_rows": [0.5] * 45}
    started, *others = journal(BY_ACCURACY, found)
    events = [started, {"seq": 1, "event": "base_evaluated", "values": [base]}, *others]
    recording = Recording.from_journal(entries(events))
    assert recording.jobs[0].score_rows == (tuple(rows["a"]),)
    assert recording.jobs[0].start.score_rows == (0.5,) * 45
    recording.write(tmp_path / "r.json.gz")
    assert Recording.read(tmp_path / "r.json.gz") == recording
    assert replay(recording, Policy(), 0.1).winner == selection_of(entries(events)).winner().job == "b"


def test_a_recording_by_the_loss_is_written_as_it_always_was(tmp_path) -> None:
    recording = Recording.from_journal(entries(journal({"metric": "loss"}, EVALUATIONS)))
    recording.write(tmp_path / "r.json")
    assert "gains" not in (tmp_path / "r.json").read_text()


def test_every_evaluation_has_a_score_or_none_has() -> None:
    with pytest.raises(RunError, match="a score for each of 2 evaluations or none at all, found 1"):
        RecordedJob(
            job="a", config={}, total_steps=2, rows_per_step=1, train_losses=(1.0, 1.0),
            evaluations=((1, 1.0), (2, 1.0)), scores=(0.5,),
        )  # fmt: skip


ROWS = 40


def point(job: str, loss: float, **changes: object) -> LossPoint:
    return LossPoint(job=job, step=9, total_steps=9, train_ema=loss, validation_loss=loss, **changes)  # type: ignore[arg-type]


def right(count: int, of: int = ROWS) -> tuple[float, ...]:
    return (1.0,) * count + (0.0,) * (of - count)


def winner_of(rows: dict[str, tuple[float, ...]], losses: dict[str, float], scorer: str) -> tuple[str, list[str]]:
    scores = {score.job: score for score in scores_of(Judgement(scorer=scorer, rows=rows))}
    winner, tied = choose([point(job, loss) for job, loss in losses.items()], scores, scorer=scorer)
    return winner.job, [other.job for other in tied]


def test_a_clear_lead_wins_against_the_loss() -> None:
    assert winner_of({"a": right(10), "b": right(35)}, {"a": 1.0, "b": 2.0}, "exact_match") == ("b", [])


def test_within_noise_the_loss_decides_and_the_others_are_named() -> None:
    rows = {"a": right(30), "b": right(31), "c": right(5)}
    losses = {"a": 1.0, "b": 2.0, "c": 0.5}
    assert winner_of(rows, losses, "exact_match") == ("a", ["b"])


def test_the_number_of_right_answers_alone_decides_for_eval_accuracy() -> None:
    rows = {"a": right(30), "b": right(31), "c": right(31)}
    losses = {"a": 1.0, "b": 2.0, "c": 1.5}
    assert winner_of(rows, losses, "eval_accuracy") == ("c", [])


def test_scores_of_any_size_are_compared_row_by_row() -> None:
    """A small lead on every row counts, even if the rows differ much among themselves."""
    drawn = random.Random(0)
    base = tuple(drawn.uniform(-1e6, 1e6) for _ in range(ROWS))
    ahead = tuple(value + 1 + 0.01 * drawn.random() for value in base)
    losses = {"a": 1.0, "b": 2.0}
    assert winner_of({"a": base, "b": ahead}, losses, "python") == ("b", [])
    assert winner_of({"a": tuple(reversed(base)), "b": ahead}, losses, "python") == ("a", ["b"])


def test_the_order_in_which_they_are_given_does_not_matter() -> None:
    rows = {f"job-{n}": right(20 + n % 5) for n in range(8)}
    losses = {job: 1 + 0.1 * (index * 3 % 8) for index, job in enumerate(rows)}
    first = winner_of(rows, losses, "exact_match")
    turned = winner_of(dict(reversed(rows.items())), dict(reversed(losses.items())), "exact_match")
    assert (first[0], sorted(first[1])) == (turned[0], sorted(turned[1]))


@pytest.mark.parametrize(
    ("rows", "interval"),
    [
        (right(5, 10), (0.2366, 0.7634)),  # Wilson's score interval, as in Newcombe (1998)
        (right(10, 10), (0.7225, 1.0)),
        (right(0, 10), (0.0, 0.2775)),
        ((1.0,), (0.2065, 1.0)),
        ((1.0, 2.0, 3.0, 4.0, 5.0), (1.0368, 4.9632)),  # Student's: 3 ± 2.776 · 1.5811 / √5
        ((0.5, 0.5), (0.5, 0.5)),
    ],
)
def test_intervals(rows: tuple[float, ...], interval: tuple[float, float]) -> None:
    assert interval_of(rows) == pytest.approx(interval, abs=0.001, rel=0.035)


@pytest.mark.parametrize("rows", [(0.3,), (1e308, -1e308, 1e308)])
def test_one_row_or_huge_scores_give_no_interval(rows: tuple[float, ...]) -> None:
    assert interval_of(rows) is None


def test_scores_count_right_answers_only_where_the_scorer_does() -> None:
    (counted,) = scores_of(Judgement(scorer="multiple_choice", rows={"a": right(3, 4)}))
    assert (counted.num_correct, counted.num_questions, counted.score, counted.exact_match) == (3, 4, 0.75, 0.75)
    (scored,) = scores_of(Judgement(scorer="http", rows={"a": (1.0, 0.5)}))
    assert (scored.num_correct, scored.num_questions, scored.score) == (None, 2, 0.75)
    assert math.isnan(scored.exact_match)
    assert scores_of(Judgement(scorer="http", failure="no connection")) == ()


def test_a_score_of_version_0_1_has_its_share_as_its_score() -> None:
    assert FinalistScore(job="a", num_correct=1, num_questions=4).score == 0.25


def scored_at_first_rung(rows: dict[str, tuple[float, ...]], losses: dict[str, float]) -> tuple[Selection, RungResult]:
    """Return a selection whose first rung, at half of the steps, ranks by ``rows``; one at 0.8 follows."""
    rungs = (Rung(progress=0.5, keep=0.5), Rung(progress=0.8, keep=0.5))
    selection = Selection(Policy(rungs=rungs), ema_alpha=1.0, total_steps=dict.fromkeys(losses, 10))
    evaluated(selection, losses, 5)
    selection.observe_scores(scores_of(Judgement(scorer="exact_match", rows=rows)))
    return selection, selection.select()


def evaluated(selection: Selection, losses: dict[str, float], step: int) -> None:
    for job, loss in losses.items():
        done = selection.history(job)[-1].step if selection.history(job) else 0
        selection.observe_losses(job, done + 1, [loss] * (step - done))
        selection.observe(job, step, loss)


def test_scores_at_a_rung_decide_that_rung_alone() -> None:
    losses = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
    selection, result = scored_at_first_rung({"a": right(1), "b": right(2), "c": right(20), "d": right(38)}, losses)
    assert result.kept == ("d", "c")
    evaluated(selection, {"c": 3.0, "d": 4.0}, 8)
    assert selection.select().kept == ("c",), "at the next rung the loss decides again"


def test_at_a_rung_the_loss_decides_within_noise() -> None:
    _, result = scored_at_first_rung({"a": right(30), "b": right(31)}, {"a": 1.0, "b": 2.0})
    assert result.kept == ("a",)
    _, result = scored_at_first_rung({"a": right(10), "b": right(31)}, {"a": 1.0, "b": 2.0})
    assert result.kept == ("b",)
