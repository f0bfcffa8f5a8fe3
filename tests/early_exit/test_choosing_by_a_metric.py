"""A race that is run by a gain: who is best, who is kept at a rung, who wins; and that a journal tells it again."""

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
    policy,
    policy_from,
    replay,
    selection_of,
)
from alto.errors import RunError
from alto.records import ExitReason, Rung, RungResult, Standing
from alto.spec.early_exit import EarlyExit
from alto.spec.scoring import score_of

HALF = Rung(progress=0.1, keep=0.5)
LEAST = score_of("x", {"x": math.nan})


def select(rung: Rung, standings: list[Standing]) -> RungResult:
    return policy.select(math.ceil(rung.keep * len(standings)), standings)


def standing(job: str, score: float, loss: float, *, is_training: bool = True) -> Standing:
    return Standing(job=job, step=5, validation_loss=loss, score=score, is_training=is_training)


@pytest.mark.parametrize(
    ("case", "standings", "kept"),
    [
        ("more is better, whatever the loss", [("a", 0.6, 0.1), ("b", 0.7, 9.0)], ["b"]),
        ("ties by the loss", [("a", 0.7, 0.6), ("b", 0.7, 0.5)], ["b"]),
        ("ties of both by job id", [("b", 0.7, 0.5), ("a", 0.7, 0.5)], ["a"]),
        ("a gain that was not finite is the least", [("a", LEAST, 0.1), ("b", -5.0, 0.5)], ["b"]),
        ("where no gain was finite the loss decides", [("a", LEAST, 0.6), ("b", LEAST, 0.5)], ["b"]),
        ("a loss that is not finite is last", [("a", 0.9, math.nan), ("b", 0.1, 0.5)], ["b"]),
        ("a negative margin is less than none", [("a", -0.1, 0.1), ("b", 0.0, 0.7)], ["b"]),
    ],
)
def test_who_is_kept_at_a_rung(case: str, standings: list[tuple[str, float, float]], kept: list[str]) -> None:
    assert list(select(HALF, [standing(*one) for one in standings]).kept) == kept


def test_evidence_has_the_scores_that_decided() -> None:
    (verdict,) = select(HALF, [standing("a", 0.6, 0.1), standing("b", 0.7, 0.9)]).dropped
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
    assert selection.best("b").step == 1, "the loss fell, and it is right less often"
    train_to(selection, "b", 10, 0.55, 0.7)
    assert selection.best("b").step == 10, "as often right, with a lower loss"
    train_to(selection, "c", 10, 0.55, 0.7)
    assert selection.winner() == selection.best("b"), "of equals the first job"
    assert selection.training == ()


def test_the_last_evaluation_of_equals_does_not_replace_the_first() -> None:
    selection = Selection(Policy(), ema_alpha=1.0, total_steps={"a": 10})
    for step in (2, 4, 6):
        train_to(selection, "a", step, 0.5, 0.7)
    assert selection.best("a").step == 2


def test_nobody_is_certain_of_a_place_that_others_may_take_by_their_gain() -> None:
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
    standings = [standing(job, score, loss) for job, (score, loss) in worth.items()]
    shuffled = draw.sample(standings, len(standings))
    assert select(HALF, shuffled) == select(HALF, standings)


# -- journals and recordings --------------------------------------------------------------------------------------


def journal(metric: dict[str, str], evaluations: dict[str, list[tuple[int, float, dict[str, Any]]]]) -> list[dict]:
    """What an executor would write of jobs of ten steps without early exit."""
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
    # An accuracy of it is NaN, which equals no NaN but has the same text.
    assert repr(Recording.read(tmp_path / "r.json.gz")) == repr(recording)
    everything = replay(recording, Policy(), 0.1)
    assert (everything.winner, everything.best_kept, everything.best_of_all, everything.regret) == ("b", 0.6, 0.6, 1.0)
    halved = replay(recording, policy_from(EarlyExit(rungs=[(0.5, 0.5)])), 0.1)
    assert halved.exits == {"a": (ExitReason.UNDERPERFORMING, 5)}


def test_a_recording_keeps_every_row_and_the_base_and_replays_as_the_journal_decided(tmp_path) -> None:
    """One of 45 rows more is right of a, whose loss is worse: within noise, so b wins, live and replayed."""
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
