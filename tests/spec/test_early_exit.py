from __future__ import annotations

import math

import pydantic
import pytest

from alto.errors import ConflictingKeysError, SpecError, UnknownKeyError
from alto.records import Rung
from alto.spec.early_exit import EarlyExit


@pytest.mark.parametrize(
    ("settings", "rungs"),
    [
        ({}, [(0.025, 0.5), (0.05, 0.2)]),
        ({"policy": "paper"}, [(0.05, 0.25)]),
        ({"warmup_ratio": 0.1}, [(0.1, 0.25)]),
        ({"select_ratio": 0.5}, [(0.05, 0.5)]),
        ({"warmup_ratio": 0.1, "select_ratio": 1}, [(0.1, 1.0)]),
        ({"policy": "paper", "warmup_ratio": 0.1}, [(0.1, 0.25)]),
        ({"rungs": [[0.1, 0.5], [0.2, 0.5]]}, [(0.1, 0.5), (0.2, 0.5)]),
    ],
)
def test_which_rungs_settings_stand_for(settings, rungs) -> None:
    expected = tuple(Rung(progress=progress, keep=keep) for progress, keep in rungs)
    early_exit = EarlyExit(**settings)
    assert early_exit.selection_rungs == expected
    resolved = early_exit.resolved()
    assert resolved.rungs == tuple(rungs)
    assert resolved.selection_rungs == expected
    assert EarlyExit(**resolved.model_dump(mode="json")) == resolved
    assert early_exit == EarlyExit(**settings)


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
    with pytest.raises(UnknownKeyError, match=r"unknown key 'xyz'. Known keys are detect_divergence"):
        EarlyExit(xyz=1)


@pytest.mark.parametrize("clashing", [{"warmup_ratio": 0.1}, {"select_ratio": 0.1}])
def test_rungs_exclude_the_ratios(clashing) -> None:
    with pytest.raises(ConflictingKeysError, match=f"both rungs and {next(iter(clashing))}"):
        EarlyExit(rungs=[(0.1, 0.5)], **clashing)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rungs": []}, "rungs should be pairs"),
        ({"rungs": [(0.2, 0.5), (0.1, 0.5)]}, r"rungs should rise in progress from rung to rung, found \[0.2, 0.1\]"),
        ({"rungs": [(0.2, 0.5), (0.2, 0.5)]}, "rungs should rise"),
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
