from __future__ import annotations

import math

import pydantic
import pytest

from alto.errors import ConflictingKeysError, SpecError, UnknownKeyError
from alto.records import Rung
from alto.spec.early_exit import PRESETS, EarlyExit, places_at


@pytest.mark.parametrize(
    ("settings", "rungs"),
    [
        ({"policy": "paper"}, [(0.05, 0.25)]),
        ({"warmup_ratio": 0.1}, [(0.1, 0.25)]),
        ({"select_ratio": 0.5}, [(0.05, 0.5)]),
        ({"warmup_ratio": 0.1, "select_ratio": 1}, [(0.1, 1.0)]),
        ({"policy": "paper", "warmup_ratio": 0.1}, [(0.1, 0.25)]),
        ({"rungs": [[0.1, 0.5], [0.2, 0.5]]}, [(0.1, 0.5), (0.2, 0.5)]),
    ],
)
def test_the_rungs_of_settings(settings, rungs) -> None:
    expected = tuple(Rung(progress=progress, keep=keep) for progress, keep in rungs)
    early_exit = EarlyExit(**settings)
    assert early_exit.selection_rungs == expected
    resolved = early_exit.resolved()
    assert resolved.rungs == tuple(rungs)
    assert resolved.selection_rungs == expected
    assert EarlyExit(**resolved.model_dump(mode="json")) == resolved
    assert early_exit == EarlyExit(**settings)


@pytest.mark.parametrize(
    ("settings", "progress", "places"),
    [
        (
            {},
            (0.01, 0.025, 0.05, 0.1, 0.25, 0.6),
            {240: [40, 20, 10, 5, 3, 1], 60: [10, 8, 5, 3, 2, 1], 6: [6, 6, 5, 3, 2, 1], 2: [2] * 5 + [1]},
        ),
        (
            {"preset": "cautious"},
            (0.025, 0.05, 0.1, 0.2, 0.4, 0.8),
            {60: [20, 14, 9, 6, 4, 3], 6: [6, 6, 5, 4, 3, 2], 1: [1] * 6},
        ),
        (
            {"preset": "preferences"},
            (0.1, 0.2, 0.3, 0.6),
            {60: [30, 9, 5, 1], 24: [16, 6, 4, 1], 6: [6, 6, 4, 1]},
        ),
        ({"preset": "greedy"}, (0.005, 0.025, 0.05, 0.1, 0.3), {60: [8, 8, 5, 3, 1], 6: [6, 6, 5, 3, 1]}),
        ({"finish_from": 1}, (0.01, 0.025, 0.05, 0.1, 0.25), {60: [10, 8, 5, 3, 2]}),
        ({"finish_from": 0.05, "min_kept": 9}, (0.01, 0.025, 0.05), {60: [10, 9, 1]}),
        ({"rungs": [[0.1, 0.5]], "min_kept": 3, "finish_from": 0.5}, (0.1, 0.5), {4: [3, 1], 10: [5, 1]}),
        ({"rungs": [[0.1, 0.5], [0.2, 0.5]], "min_kept": [5, 2]}, (0.1, 0.2), {6: [5, 2], 20: [10, 5]}),
    ],
)  # fmt: skip
def test_places_of_presets(settings, progress, places) -> None:
    early_exit = EarlyExit(**settings)
    rungs = early_exit.selection_rungs
    assert tuple(rung.progress for rung in rungs) == progress
    for num_jobs, expected in places.items():
        assert [places_at(rungs, index, num_jobs) for index in range(len(rungs))] == expected
    assert early_exit.resolved().selection_rungs == rungs
    assert early_exit.resolved().resolved() == early_exit.resolved()


@pytest.mark.parametrize(
    ("lr_warmup", "rungs"),
    [
        (0.0, [(0.01, 1 / 6, 8), (0.025, 0.5, 8), (0.05, 0.5, 5), (0.1, 0.5, 3), (0.25, 0.5, 2), (0.6, 1.0, 1)]),
        (0.03, [(0.01, 1 / 6, 8), (0.025, 0.5, 8), (0.05, 0.5, 5), (0.1, 0.5, 3), (0.25, 0.5, 2), (0.6, 1.0, 1)]),
        (0.06, [(0.015, 1 / 6, 8), (0.025, 0.5, 8), (0.05, 0.5, 5), (0.1, 0.5, 3), (0.25, 0.5, 2), (0.6, 1.0, 1)]),
        (0.1, [(0.025, 1 / 12, 8), (0.05, 0.5, 5), (0.1, 0.5, 3), (0.25, 0.5, 2), (0.6, 1.0, 1)]),
        (0.3, [(0.075, 1 / 24, 5), (0.1, 0.5, 3), (0.25, 0.5, 2), (0.6, 1.0, 1)]),
        (1.0, [(0.25, 1 / 96, 2), (0.6, 1.0, 1)]),
    ],
)
def test_no_rung_of_a_preset_is_in_the_first_quarter_of_the_warmup(lr_warmup, rungs) -> None:
    found = EarlyExit().resolved(earliest=lr_warmup / 4).selection_rungs
    assert [(rung.progress, rung.min_kept) for rung in found] == [(progress, least) for progress, _, least in rungs]
    assert [rung.keep for rung in found] == pytest.approx([keep for _, keep, _ in rungs])


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("lr_warmup", [0.0, 0.1, 1.0])
def test_every_preset_can_be_resolved_and_written(preset, lr_warmup) -> None:
    found = EarlyExit(preset=preset).resolved(earliest=lr_warmup / 4)
    assert EarlyExit(**found.model_dump(mode="json")) == found
    progress = [rung.progress for rung in found.selection_rungs]
    assert progress == sorted(set(progress))


@pytest.mark.parametrize("steps", [[3], [12], [12, 200]])
def test_rungs_of_a_preset_stay_however_few_steps_there_are(steps) -> None:
    for preset in PRESETS:
        resolved = EarlyExit(preset=preset).resolved(steps=steps)
        assert resolved == EarlyExit(preset=preset).resolved()
        assert resolved.select


def test_a_rung_after_the_rise_of_the_learning_rate_takes_those_before_it() -> None:
    found = EarlyExit().resolved(earliest=0.025).selection_rungs
    assert [(rung.progress, rung.min_kept) for rung in found] == [
        (0.025, 8), (0.05, 5), (0.1, 3), (0.25, 2), (0.6, 1)
    ]  # fmt: skip
    assert [places_at(found, index, 240) for index in range(5)] == [20, 10, 5, 3, 1], "as without a warmup"
    found = EarlyExit().resolved(earliest=0.04).selection_rungs
    assert [(rung.progress, rung.min_kept) for rung in found] == [
        (0.04, 8), (0.05, 5), (0.1, 3), (0.25, 2), (0.6, 1)
    ]  # fmt: skip


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("earliest", [2 / 19, 0.3, 0.6, 2 / 3])
def test_rungs_wait_until_short_jobs_with_a_warmup_have_learned(preset, earliest) -> None:
    found = EarlyExit(preset=preset).resolved(earliest=earliest)
    assert EarlyExit(**found.model_dump(mode="json")) == found
    progress = [rung.progress for rung in found.selection_rungs]
    assert progress[0] == pytest.approx(max(earliest, PRESETS[preset].rungs[0][0]))
    assert progress == sorted(set(progress))
    assert progress[-1] < 1


@pytest.mark.parametrize("steps", [1, 2])
def test_jobs_of_fewer_than_three_steps_are_not_ranked(steps) -> None:
    assert not EarlyExit().resolved(steps=[steps, 100]).select
    assert not EarlyExit(finish_from=1).resolved(steps=[steps]).select


@pytest.mark.parametrize("settings", [{"rungs": [(0.02, 0.5)]}, {"policy": "paper"}, {"warmup_ratio": 0.02}])
def test_rungs_that_are_set_stay_where_they_are(settings) -> None:
    settings = EarlyExit(**settings)
    assert settings.resolved(earliest=0.075).selection_rungs == settings.selection_rungs
    assert settings.resolved(steps=[4]).selection_rungs == settings.selection_rungs


def test_settings_of_a_run_of_version_0_1_select_as_it_did() -> None:
    of_0_1 = {"enabled": True, "policy": "alto", "select": True, "window": 2, "rungs": None}
    found = EarlyExit.of_run(of_0_1)
    assert found.rungs == ((0.025, 0.5), (0.05, 0.2))
    assert not found.compares_equal_shares
    assert [rung.max_kept for rung in found.selection_rungs] == [None, None]
    assert EarlyExit.of_run({**of_0_1, "rungs": [[0.1, 0.5]]}).rungs == ((0.1, 0.5),)
    assert EarlyExit.of_run({**of_0_1, "policy": "paper"}).selection_rungs == EarlyExit(policy="paper").selection_rungs
    assert EarlyExit.of_run(EarlyExit().model_dump(mode="json")) == EarlyExit()
    resolved = EarlyExit(preset="greedy").resolved()
    assert EarlyExit.of_run(resolved.model_dump(mode="json")) == resolved


def test_the_paper_compares_evaluations() -> None:
    assert EarlyExit().compares_equal_shares
    assert not EarlyExit(policy="paper").compares_equal_shares
    assert not EarlyExit(equal_shares=False).compares_equal_shares


@pytest.mark.parametrize("other", [{"rungs": [(0.1, 0.5)]}, {"warmup_ratio": 0.1}, {"select_ratio": 0.1}])
def test_a_preset_excludes_rungs(other) -> None:
    with pytest.raises(ConflictingKeysError, match=f"both preset and {next(iter(other))}"):
        EarlyExit(preset="cautious", **other)


def test_a_preset_is_not_the_paper_s() -> None:
    with pytest.raises(ConflictingKeysError, match="a preset with policy 'paper'"):
        EarlyExit(preset="cautious", policy="paper")


def test_the_paper_s_defaults() -> None:
    settings = EarlyExit(policy="paper")
    assert (settings.window, settings.divergence_patience, settings.overfitting_patience) == (2, 2, 2)
    assert (settings.tau_slope, settings.tau_gap) == (0.001, 0.1)


def test_frozen_and_keyword_only() -> None:
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        EarlyExit().window = 3
    with pytest.raises(TypeError):
        EarlyExit(True)


def test_a_misspelt_key_says_which_was_meant() -> None:
    with pytest.raises(UnknownKeyError, match=r"unknown key 'warmup_rato'. Did you mean 'warmup_ratio'\?"):
        EarlyExit(warmup_rato=0.05)
    with pytest.raises(UnknownKeyError, match=r"unknown key 'xyz'. Known keys are clear_from, collapse_patience"):
        EarlyExit(xyz=1)


@pytest.mark.parametrize("clashing", [{"warmup_ratio": 0.1}, {"select_ratio": 0.1}])
def test_rungs_exclude_the_ratios(clashing) -> None:
    with pytest.raises(ConflictingKeysError, match=f"both rungs and {next(iter(clashing))}"):
        EarlyExit(rungs=[(0.1, 0.5)], **clashing)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rungs": []}, "rungs should be pairs"),
        ({"preset": "bold"}, "preset .* should be 'default' or 'cautious'"),
        ({"min_kept": 0}, "min_kept should be a whole number >= 1"),
        ({"min_kept": []}, "min_kept should be a whole number >= 1"),
        ({"min_kept": [3, 0]}, "min_kept should be a whole number >= 1"),
        ({"min_kept": True}, "min_kept should be a whole number >= 1"),
        ({"min_kept": [3, 2]}, r"min_kept should be one number, or one for each of rungs, found \[3, 2\]"),
        ({"rungs": [(0.1, 0.5)], "min_kept": [3, 2]}, r"min_kept should be one number, or .* the number of rungs is 1"),
        (
            {"finish_from": 0.01},
            "finish_from: expected a share of the steps above the first rung's 0.01, found 0.01",
        ),
        (
            {"rungs": [(0.3, 0.5)], "finish_from": 0.2},
            "finish_from: expected a share of the steps above the last rung's",
        ),
        ({"rungs": [(0.2, 0.5), (0.1, 0.5)]}, r"rungs should be in increasing order of progress, found \[0.2, 0.1\]"),
        ({"rungs": [(0.2, 0.5), (0.2, 0.5)]}, "rungs should be in increasing order"),
        ({"rungs": [(1.0, 0.5)]}, "rungs should be pairs of progress .above 0, below 1."),
        ({"rungs": [(0.5, 1.5)]}, "rungs should be pairs"),
        ({"rungs": [(0.5, "0.5")]}, "rungs should be pairs"),
        ({"rungs": [(0.5, True)]}, "rungs should be pairs"),
        ({"rungs": [(math.nan, 0.5)]}, "rungs should be pairs"),
        ({"rungs": [0.5]}, "rungs should be pairs"),
        ({"warmup_ratio": 0.0}, r"warmup_ratio .* should be a finite number > 0 and < 1 or null, found 0.0"),
        ({"warmup_ratio": 1.0}, "warmup_ratio .* should be"),
        ({"warmup_ratio": "0.05"}, "warmup_ratio .* Write 0.05 without quotes"),
        ({"select_ratio": 1.1}, "select_ratio .* should be"),
        ({"window": 1}, r"window .* should be a whole number >= 2 and <= 1000000, found 1"),
        ({"window": True}, "window .* should be a whole number"),
        ({"divergence_patience": 0}, "divergence_patience .* should be"),
        ({"overfitting_patience": 0}, "overfitting_patience .* should be"),
        ({"tau_slope": 0}, "tau_slope .* should be"),
        ({"tau_slope": math.nan}, "tau_slope .* should be"),
        ({"tau_gap": math.inf}, "tau_gap .* should be"),
        ({"tau_upturn": -1}, "tau_upturn .* should be"),
        ({"tau_noise": -1}, "tau_noise .* should be"),
        ({"ema_alpha": 0}, "ema_alpha .* should be"),
        ({"ema_alpha": 1.01}, "ema_alpha .* should be"),
        ({"policy": "asha"}, "policy .* should be 'alto' or 'paper', found 'asha'"),
        ({"enabled": "perhaps"}, "enabled .* should be true or false"),
    ],
)
def test_values_are_bounded(settings, message) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        EarlyExit(**settings)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("given", "missing"),
    [({"evaluations": [[1.0, 12]]}, "final_evaluations"), ({"final_evaluations": [2, 12]}, "evaluations")],
)
def test_evaluations_and_those_in_the_end_are_given_together(given: dict[str, object], missing: str) -> None:
    (name,) = given
    with pytest.raises(SpecError, match=rf"^{name}: expected {missing} together with this key, found"):
        EarlyExit(**given)


def test_jobs_of_two_steps_are_not_ranked_with_a_finish_of_their_own_either() -> None:
    assert not EarlyExit(finish_from=0.02).resolved(steps=[2], earliest=0.025).select


@pytest.mark.parametrize(
    ("settings", "clear"),
    [
        ({}, [0.25]),
        ({"finish_from": 0.3}, [0.25]),
        ({"finish_from": 1}, []),  # several finalists are wanted
        ({"finish_from": 1, "clear_from": 0.1}, [0.1, 0.25]),
        ({"clear_from": 1}, []),
        ({"preset": "cautious"}, []),
        ({"preset": "preferences"}, []),
        ({"rungs": [[0.1, 0.5], [0.3, 0.5]], "finish_from": 0.5}, []),
        ({"rungs": [[0.1, 0.5], [0.3, 0.5]], "clear_from": 0.2}, [0.3]),
        ({"policy": "paper"}, []),
    ],
)
def test_rungs_that_end_clear_losers(settings: dict[str, object], clear: list[float]) -> None:
    for found in (EarlyExit(**settings), EarlyExit(**settings).resolved()):
        assert [rung.progress for rung in found.selection_rungs if rung.ends_clear_losers] == clear
