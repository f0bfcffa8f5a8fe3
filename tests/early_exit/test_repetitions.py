"""Jobs that repeat a configuration with other seeds: the configuration is ranked, not the lucky seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto.early_exit import Selection, policy_from
from alto.early_exit.noise import ranked_configurations
from alto.early_exit.policy import select
from alto.records import Candidate, ExitDecision, ExitReason
from alto.spec import EarlyExit
from alto.spec.scoring import LEAST_SCORE

PAIRS = {"a1": "a1", "a2": "a1", "b1": "b1", "b2": "b1"}


def candidate(job: str, loss: float, **facts: object) -> Candidate:
    return Candidate(**{"job": job, "step": 5, "validation_loss": loss} | facts)  # type: ignore[arg-type]


def candidates(losses: Mapping[str, float]) -> list[Candidate]:
    return [candidate(job, loss) for job, loss in losses.items()]


@pytest.mark.parametrize(
    ("losses", "places", "kept", "dropped"),
    [
        ({"a1": 1.0, "a2": 3.0, "b1": 1.5, "b2": 1.6}, 1, ["b1", "b2"], ["a1", "a2"]),  # the lucky seed of a
        ({"a1": 1.0, "a2": 1.2, "b1": 1.5, "b2": 1.6}, 1, ["a1", "a2"], ["b1", "b2"]),
        ({"a1": 1.0, "a2": 3.0, "b1": 1.5, "b2": 1.6}, 2, ["b1", "b2", "a1", "a2"], []),
        ({"a1": 1.0, "a2": math.inf, "b1": 9.0, "b2": 9.0}, 1, ["b1", "b2"], ["a1", "a2"]),
        ({"a2": 3.0, "a1": 1.0, "c": 1.9, "d": 5.0}, 2, ["c", "a1", "a2"], ["d"]),  # the others have no repetitions
    ],
)
def test_all_jobs_of_a_configuration_are_kept_or_none(
    losses: Mapping[str, float], places: int, kept: Sequence[str], dropped: Sequence[str]
) -> None:
    result = select(places, candidates(losses), configuration_of=PAIRS)
    assert list(result.kept) == kept
    assert [decision.job for decision in result.dropped] == dropped


def test_evidence_counts_configurations() -> None:
    result = select(1, candidates({"a1": 1.0, "a2": 3.0, "b1": 1.5, "b2": 1.7}), configuration_of=PAIRS)
    assert result.dropped[0].evidence == {
        "rank": 2.0,
        "validation_loss": 1.0,
        "mean_loss": 2.0,
        "num_competing": 2.0,
        "num_kept": 1.0,
        "cutoff_loss": pytest.approx(1.6),
    }


def test_a_configuration_with_a_failed_job_comes_after_all_others() -> None:
    items = candidates({"a1": 1.0, "b1": 5.0, "b2": 5.0})
    order = [group.mean.job for group in ranked_configurations(items, PAIRS, failed={"a1"})]
    assert order == ["b1", "a1"]


def test_rows_of_scores_are_averaged_and_decide_within_noise() -> None:
    """The means of the rows are compared: a mean that leads by one row of four is within noise."""
    rows = {
        "a1": (1.0, 1.0, 1.0, 0.0),
        "a2": (1.0, 1.0, 1.0, 1.0),
        "b1": (1.0, 1.0, 0.0, 0.0),
        "b2": (1.0, 1.0, 1.0, 1.0),
    }
    losses = {"a1": 2.0, "a2": 2.0, "b1": 1.0, "b2": 1.0}
    items = [candidate(job, losses[job], score=sum(rows[job]) / 4, score_rows=rows[job]) for job in rows]
    first, second = ranked_configurations(items, PAIRS)
    assert (first.mean.job, second.mean.job) == ("b1", "a1")
    assert second.mean.score_rows == (1.0, 1.0, 1.0, 0.5)
    assert second.mean.score == pytest.approx(0.875)


@given(st.permutations(list(PAIRS)), st.lists(st.floats(0.1, 9), min_size=4, max_size=4))
def test_the_order_in_which_jobs_are_given_does_not_matter(order: Sequence[str], losses: Sequence[float]) -> None:
    known = dict(zip(PAIRS, losses, strict=True))
    expected = select(1, candidates(known), configuration_of=PAIRS)
    assert select(1, candidates({job: known[job] for job in order}), configuration_of=PAIRS) == expected


def trained(losses: Mapping[str, tuple[float, float]], configuration_of: Mapping[str, str]) -> Selection:
    """Return the selection after jobs of ten steps with one rung in the middle that keeps half of them."""
    settings = EarlyExit(rungs=((0.5, 0.5),), detect_divergence=False, detect_overfitting=False)
    selection = Selection(
        policy_from(settings), ema_alpha=0.1, total_steps=dict.fromkeys(losses, 10), configuration_of=configuration_of
    )
    for job, (middle, _) in losses.items():
        selection.observe_losses(job, 1, [1.0] * 5)
        selection.observe(job, 5, middle)
    assert not (configuration_of and selection.rungs.certain_to_be_kept())
    selection.select()
    for job in selection.training:
        selection.observe_losses(job, 6, [1.0] * 5)
        selection.observe(job, 10, losses[job][1])
    return selection


LUCKY = {"a1": (1.0, 0.5), "a2": (3.0, 2.5), "b1": (1.6, 1.2), "b2": (1.5, 1.4)}


def test_the_lucky_seed_does_not_win() -> None:
    """Among jobs a1 has the lowest loss; among configurations b is better on average, and its best seed is chosen."""
    assert trained(LUCKY, {}).winner().job == "a1"  # type: ignore[union-attr]
    selection = trained(LUCKY, PAIRS)
    assert selection.decision_on("a1").reason is ExitReason.UNDERPERFORMING  # type: ignore[union-attr]
    assert selection.winner().job == "b1"  # type: ignore[union-attr]
    assert [point.job for point in selection.leaders(2)] == ["b1", "a1"]


def test_a_seed_that_failed_speaks_against_its_configuration() -> None:
    settings = EarlyExit(rungs=((0.5, 0.5),), detect_divergence=False, detect_overfitting=False)
    selection = Selection(
        policy_from(settings), ema_alpha=0.1, total_steps=dict.fromkeys(PAIRS, 10), configuration_of=PAIRS
    )
    selection.end(ExitDecision(job="a2", step=0, reason=ExitReason.FAILED))
    for job, loss in {"a1": 1.0, "b1": 2.0, "b2": 2.0}.items():
        selection.observe_losses(job, 1, [1.0] * 5)
        selection.observe(job, 5, loss)
    assert selection.select().kept == ("b1", "b2")
    assert selection.leaders(1)[0].job == "b1"


def test_places_are_counted_in_configurations() -> None:
    """Half of two configurations is one, however many jobs repeat them."""
    three = {**PAIRS, "a3": "a1", "a4": "a1"}
    selection = trained({**LUCKY, "a3": (3.0, 2.0), "a4": (3.0, 2.0)}, three)
    assert selection.training == ()
    assert {job for job in three if selection.decision_on(job) is None} == {"b1", "b2"}


def test_scores_that_are_not_finite_make_the_least_of_means() -> None:
    """``LEAST_SCORE`` twice has no finite sum; with a high score its mean would be finite."""
    items = [
        *(candidate(job, 1.0, score=LEAST_SCORE) for job in ("a1", "a2")),
        *(candidate(job, 2.0, score=score) for job, score in {"b1": LEAST_SCORE, "b2": 0.9}.items()),
        candidate("c", 9.0, score=-5.0),
    ]
    order = ranked_configurations(items, PAIRS)
    assert [group.mean.job for group in order] == ["c", "a1", "b1"]
    assert [group.mean.score for group in order] == [-5.0, LEAST_SCORE, LEAST_SCORE]


def test_rows_that_are_not_finite_are_not_averaged() -> None:
    rows = {"a1": (math.inf, 0.0), "a2": (-math.inf, 0.0), "b1": (1.0, 0.0), "b2": (0.0, 0.0)}
    items = [candidate(job, 1.0, score=0.5, score_rows=values) for job, values in rows.items()]
    found = {group.mean.job: group.mean.score_rows for group in ranked_configurations(items, PAIRS)}
    assert found == {"a1": (), "b1": (0.5, 0.0)}


def test_a_configuration_with_a_failed_job_is_not_named_as_within_noise_of_the_winner() -> None:
    """Its mean score is the best, but it ranks last."""
    settings = EarlyExit(select=False, detect_divergence=False, detect_overfitting=False)
    configurations = {**PAIRS, "c1": "c1", "c2": "c1"}
    selection = Selection(
        policy_from(settings), ema_alpha=0.1, total_steps=dict.fromkeys(configurations, 10),
        configuration_of=configurations,
    )  # fmt: skip
    rows = {"a": (1.0,) * 8, "b": (1.0,) * 7 + (0.0,), "c": (1.0,) * 6 + (0.0,) * 2}
    losses = {"a": 3.0, "b": 1.0, "c": 2.0}
    for job in configurations:
        selection.observe_losses(job, 1, [1.0] * 5)
        name = job[0]
        selection.observe(job, 5, losses[name], score=sum(rows[name]) / 8, score_rows=rows[name])
    selection.end(ExitDecision(job="a2", step=5, reason=ExitReason.DIVERGING))
    assert selection.winner().job == "b1"  # type: ignore[union-attr]
    assert [point.job for point in selection.within_noise_of_winner()] == ["c1"]


def test_what_is_left_of_a_configuration_has_its_id() -> None:
    """The first of its jobs has no evaluation."""
    order = ranked_configurations(candidates({"a2": 1.0, "b1": 2.0, "b2": 2.0}), PAIRS, failed={"a1"})
    assert [(group.mean.job, [one.job for one in group.members]) for group in order] == [
        ("b1", ["b1", "b2"]),
        ("a1", ["a2"]),
    ]


def test_a_loss_that_is_nan_ranks_its_configuration_last() -> None:
    items = candidates({"a1": math.nan, "a2": 1.0, "b1": 9.0, "b2": 9.0})
    assert [group.mean.validation_loss for group in ranked_configurations(items, PAIRS)] == [9.0, math.inf]


def test_a_configuration_trains_as_long_as_one_of_its_jobs() -> None:
    """So no other configuration continues next to it at the finish."""
    items = [
        candidate("a1", 1.0, is_training=False),
        candidate("a2", 1.0, is_training=True),
        candidate("b1", 2.0),
        candidate("b2", 2.0),
    ]
    assert select(1, items, is_finish=True, configuration_of=PAIRS).kept == ("a1", "a2")
    ended = [replace(item, is_training=item.job.startswith("b")) for item in items]
    assert select(1, ended, is_finish=True, configuration_of=PAIRS).kept == ("a1", "a2", "b1", "b2")


def test_losses_of_other_scales_are_compared_as_shares_of_the_mean_base_loss() -> None:
    """The loss of the base must be known for all jobs of a configuration; seeds may see other noise there."""
    items = [
        candidate("a1", 1.0, loss_scale="x", start_loss=2.0),
        candidate("a2", 1.0, loss_scale="x", start_loss=4.0),
        candidate("b1", 2.0, loss_scale="y", start_loss=8.0),
        candidate("b2", 2.0, loss_scale="y", start_loss=8.0),
    ]
    order = ranked_configurations(items, PAIRS)
    assert [(group.mean.job, group.mean.start_loss) for group in order] == [("b1", 8.0), ("a1", 3.0)]
    unknown = [replace(item, start_loss=None if item.job == "a2" else item.start_loss) for item in items]
    assert [group.mean.start_loss for group in ranked_configurations(unknown, PAIRS)] == [None, 8.0]
