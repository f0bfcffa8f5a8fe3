"""Sentences and numbers as users see them, and the explanation of a winner's choice."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journals import entries, entry

from alto.records import Rung
from alto.runs import RunHistory
from alto.runs.events import KernelsCompiled, TaskStarted
from alto.views import choice_notes
from alto.views.wording import (
    clean,
    describe_compiling,
    describe_config,
    describe_rungs,
    describe_task,
    describe_time,
    format_duration,
    format_loss,
    format_percent,
    format_setting,
    tidy_config,
    varying_keys,
)


@given(st.text())
def test_clean_text_is_one_printable_line(text):
    assert clean(text).isprintable()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain name", "plain name"),
        ("red \x1b[31mname", "red [31mname"),
        ("two\nlines\tand tabs", "two lines and tabs"),
        ("right\u202eto left", "rightto left"),
        ("clear\x9b2J", "clear2J"),
        ("Grüße 数学", "Grüße 数学"),
    ],
)
def test_clean(text, expected):
    assert clean(text) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2e-4, "2e-4"),
        (1e-5, "1e-5"),
        (1.25e-3, "1.25e-3"),
        (0.05, "0.05"),
        (0.0, "0"),
        (1e6, "1e6"),
        (math.inf, "inf"),
        (16, "16"),
        (True, "yes"),
        (None, "–"),
        (["q", "v"], "q, v"),
        ({"a": 1}, "a 1"),
    ],
)
def test_format_setting(value, expected):
    assert format_setting(value) == expected


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (1.23456, "1.2346"),
        (0.0, "0.0000"),
        (-0.25, "-0.2500"),
        (0.001, "0.0010"),
        (4.2391e-5, "4.24e-5"),
        (-4.2391e-5, "-4.24e-5"),
        (32_219.0, "32200"),
        (1e6, "1e6"),
        (math.nan, "not a number"),
        (math.inf, "infinite"),
        (None, "–"),
    ],
)
def test_format_loss(loss, expected):
    assert format_loss(loss) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")]
)
def test_format_duration(seconds, expected):
    assert format_duration(seconds) == expected


def test_format_percent_keeps_half_percents():
    assert (format_percent(0.025), format_percent(0.5), format_percent(1.0)) == ("2.5 %", "50 %", "100 %")


@pytest.mark.parametrize(
    ("num_jobs", "expected"),
    [
        (60, "at 1 % keep 10 of 60 jobs, at 2.5 % 8, at 5 % 5, from 60 % only the best"),
        (8, "at 5 % keep 5 of 8 jobs, from 60 % only the best"),
        (4, "from 60 % only the best"),
    ],
)
def test_rungs_are_described_by_the_jobs_that_they_keep(num_jobs: int, expected: str) -> None:
    rungs = [(0.01, 1 / 6, 8), (0.025, 0.5, 8), (0.05, 0.5, 5)]
    history: Any = SimpleNamespace(
        rung_settings=(
            *(Rung(progress=at, keep=keep, min_kept=least) for at, keep, least in rungs),
            Rung(progress=0.6, keep=1.0, max_kept=1),
        ),
        jobs=dict.fromkeys(map(str, range(num_jobs))),
    )
    assert describe_rungs(history) == expected


def test_a_rung_that_also_ends_jobs_far_behind_keeps_at_most_its_number() -> None:
    rungs = ((0.1, 0.5, False), (0.25, 0.5, True))
    history: Any = SimpleNamespace(
        rung_settings=tuple(Rung(progress=at, keep=keep, ends_clear_losers=clear) for at, keep, clear in rungs),
        jobs=dict.fromkeys("abcdefgh"),
    )
    assert describe_rungs(history) == "at 10 % keep 4 of 8 jobs, at 25 % at most 2"


def test_only_varying_keys_best_known_first():
    configs = [
        {"zeta": 1, "r": 8, "learning_rate": 1e-4, "seed": 3},
        {"zeta": 2, "r": 16, "learning_rate": 1e-3, "seed": 3},
    ]
    assert varying_keys(configs) == ("learning_rate", "r", "zeta")


def test_a_missing_key_and_unhashable_values_vary():
    assert varying_keys([{"target_modules": ["q"]}, {"target_modules": ["q", "v"]}, {}]) == ("target_modules",)


def test_alpha_tied_to_the_rank_is_no_second_key():
    tied = [tidy_config({"r": rank, "lora_alpha": 2 * rank}) for rank in (8, 16)]
    assert varying_keys(tied) == ("r",)
    free = [tidy_config({"r": 8, "lora_alpha": alpha}) for alpha in (8, 16)]
    assert varying_keys(free) == ("alpha/r",)
    assert describe_config(free[1], varying_keys(free)) == "alpha/r 2"


def started(num_ranks: int) -> TaskStarted:
    event = entry({"event": "task_started", "method": "sft", "num_ranks": num_ranks, "jobs": []}).event
    assert isinstance(event, TaskStarted)
    return event


def test_several_ranks_are_shown():
    assert describe_task(started(num_ranks=4)) == ["sft", "4 ranks"]
    assert describe_task(started(num_ranks=1)) == ["sft"]


def test_compiling_says_how_far_it_is_and_then_how_long_it_took():
    texts = [describe_compiling(KernelsCompiled(done=done, total=24, duration_s=62.4)) for done in (0, 3, 24)]
    assert texts == [
        "compiling kernels for the first step: 0 of 24",
        "compiling kernels for the first step: 3 of 24",
        "24 kernels compiled in 1 min 02 s",
    ]


def test_the_time_of_a_run_is_split_by_what_it_was_spent_on():
    history = SimpleNamespace(
        duration_s=90.0,
        measuring_s=10.0,
        time_s={"training": 60.0, "evaluation": 15.0, "saving": 1.0},
        samples_trained=10,
        samples_budgeted=300,
    )
    assert describe_time(history) == [
        "time: training 60 %, evaluating 15 %, measuring 10 %, saving 1 %, other 14 %",
        # 90 s of this run, and 290 samples at 6 s each
        "training all jobs: about 30 min 30 s, without further evaluations or measuring",
    ]
    history.measuring_s = 0.0
    assert describe_time(history)[1].endswith("30 min 30 s, without further evaluations")
    history.samples_trained = 300
    assert len(describe_time(history)) == 1
    history.time_s = {}
    assert describe_time(history) == [], "journals of earlier versions do not say"


def test_a_plain_winner_needs_no_explanation(small_run) -> None:
    assert choice_notes(RunHistory.of(entries(small_run))) == ()
    assert choice_notes(RunHistory.of(entries(small_run[:-1]))) == ()


def test_jobs_that_the_rows_cannot_tell_from_the_winner_are_named(preference_run) -> None:
    preference_run[-1]["within_noise"] = [{"job": job, "score": 0.7, "validation_loss": 0.7} for job in "ab"]
    (note,) = choice_notes(RunHistory.of(entries(preference_run)))
    assert (
        note == "reward accuracy: 50 validation rows cannot separate c from a, b; the lowest validation loss decided."
    )


def test_losses_of_other_scales_do_not_decide(preference_run) -> None:
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
