"""What is said of how a winner was chosen."""

from __future__ import annotations

from journals import entries

from alto.runs import RunHistory
from alto.views import choice_notes


def test_nothing_is_said_of_a_plain_winner(small_run) -> None:
    assert choice_notes(RunHistory.of(entries(small_run))) == ()
    assert choice_notes(RunHistory.of(entries(small_run[:-1]))) == ()


def test_jobs_that_the_rows_cannot_tell_from_the_winner_are_named(preference_run) -> None:
    preference_run[-1]["within_noise"] = [{"job": job, "score": 0.7, "validation_loss": 0.7} for job in "ab"]
    (note,) = choice_notes(RunHistory.of(entries(preference_run)))
    assert (
        note == "reward accuracy: 50 validation rows cannot separate c from a, b; the lowest validation loss decided."
    )


def test_losses_of_other_scales_are_not_said_to_decide(preference_run) -> None:
    preference_run[-1]["within_noise"] = [{"job": "a", "gain": 0.7, "validation_loss": 0.7}]
    preference_run[0]["jobs"][0]["config"]["beta"] = 0.5
    (note,) = choice_notes(RunHistory.of(entries(preference_run)))
    assert note.endswith("cannot separate c from a; the highest reward accuracy (losses of different scale) decided.")
    base = {"event": "base_evaluated", "time": 0.0, "values": [{"jobs": list("abc"), "validation_loss": 0.69}]}
    base["values"][0]["metrics"] = {"reward_accuracy": 0.5}
    (note,) = choice_notes(RunHistory.of(entries([preference_run[0], base, *preference_run[1:]])))
    assert note.endswith("cannot separate c from a; the lowest validation loss, as a share of the base's, decided.")


def test_a_winner_that_was_ended_as_underperforming_comes_with_the_reason(small_run) -> None:
    small_run[-1] |= {"best_job": "b", "best_validation_loss": 1.8}
    (note,) = choice_notes(RunHistory.of(entries(small_run)))
    assert "b was ended as underperforming at 10 % of its steps, as rank 3 of 3, and won nevertheless with its" in note
    assert note.endswith("A larger early_exit.min_kept, or later rungs, lets more jobs train for longer.")
    small_run[0]["early_exit"]["policy"] = "paper"
    (note,) = choice_notes(RunHistory.of(entries(small_run)))
    assert note.endswith("A larger select_ratio lets more jobs train for longer.")
