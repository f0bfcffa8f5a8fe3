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
    with pytest.raises(UnknownKeyError, match=r"found 'warmup_rato'. Did you mean 'warmup_ratio'\?"):
        EarlyExit(warmup_rato=0.05)
    with pytest.raises(UnknownKeyError, match=r"found 'xyz'. Known keys: enabled, policy"):
        EarlyExit(xyz=1)


@pytest.mark.parametrize("clashing", [{"warmup_ratio": 0.1}, {"select_ratio": 0.1}])
def test_rungs_exclude_the_ratios(clashing) -> None:
    with pytest.raises(ConflictingKeysError, match=f"found rungs and {next(iter(clashing))}"):
        EarlyExit(rungs=[(0.1, 0.5)], **clashing)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rungs": []}, "expected at least one"),
        ({"rungs": [(0.2, 0.5), (0.1, 0.5)]}, r"expected progress to rise from rung to rung, found \[0.2, 0.1\]"),
        ({"rungs": [(0.2, 0.5), (0.2, 0.5)]}, "expected progress to rise"),
        ({"rungs": [(1.0, 0.5)]}, r"early_exit.rungs.0.0: expected the value to be less than 1, found 1.0"),
        ({"rungs": [(0.5, 1.5)]}, r"early_exit.rungs.0.1: expected the value to be less than or equal to 1"),
        ({"rungs": [0.5]}, "early_exit.rungs.0: expected"),
        ({"warmup_ratio": 0.0}, "warmup_ratio: expected the value to be greater than 0, found 0.0"),
        ({"warmup_ratio": 1.0}, "warmup_ratio: expected"),
        ({"select_ratio": 1.1}, "select_ratio: expected"),
        ({"window": 1}, r"window: expected .* found 1. Correct it, or leave window out for the default \(2\)"),
        ({"divergence_patience": 0}, "divergence_patience: expected"),
        ({"overfitting_patience": 0}, "overfitting_patience: expected"),
        ({"tau_slope": 0}, "tau_slope: expected"),
        ({"tau_slope": math.nan}, "tau_slope: expected"),
        ({"tau_gap": math.inf}, "tau_gap: expected"),
        ({"tau_upturn": -1}, "tau_upturn: expected"),
        ({"tau_noise": -1}, "tau_noise: expected"),
        ({"ema_alpha": 0}, "ema_alpha: expected"),
        ({"ema_alpha": 1.01}, "ema_alpha: expected"),
        ({"policy": "asha"}, "policy: expected the value to be 'alto' or 'paper', found 'asha'"),
        ({"enabled": "perhaps"}, "enabled: expected"),
    ],
)
def test_values_are_bounded(settings, message) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        EarlyExit(**settings)
    assert isinstance(caught.value, ValueError)


def test_inside_another_model_the_cause_is_kept() -> None:
    class Outer(pydantic.BaseModel):
        early_exit: EarlyExit

    assert Outer(early_exit={"warmup_ratio": 0.1}).early_exit == EarlyExit(warmup_ratio=0.1)
    with pytest.raises(pydantic.ValidationError) as caught:
        Outer(early_exit={"warmup_rato": 0.1})
    assert isinstance(caught.value.errors()[0]["ctx"]["error"], UnknownKeyError)
