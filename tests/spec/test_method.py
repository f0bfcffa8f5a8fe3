"""Methods by name: their settings and forms of rows, without torch."""

from __future__ import annotations

import re

import pytest

from alto.errors import SpecError, UnknownKeyError
from alto.spec.method import OWN_METHODS, Method, find_method
from alto.spec.objective_settings import DpoSettings, ObjectiveEntry, ObjectiveSettings, OrpoSettings
from alto.spec.task_checks import check_selection


def test_methods_of_alto() -> None:
    assert OWN_METHODS == ("sft", "dpo", "orpo", "cpo", "kto", "classification", "regression", "grpo")
    assert [name for name in OWN_METHODS if find_method(name).entry.generates] == ["grpo"]
    assert [name for name in OWN_METHODS if find_method(name).entry.needs_reference] == ["dpo", "kto"]
    assert [name for name in OWN_METHODS if find_method(name).entry.is_paired] == ["dpo", "orpo", "cpo"]
    assert [name for name in OWN_METHODS if find_method(name).entry.problem_types] == ["classification", "regression"]


def test_a_form_of_a_loss_is_no_method() -> None:
    with pytest.raises(
        SpecError, match=r"^method should be one of sft, dpo, orpo, .*, found 'ipo'\. Set method: dpo and"
    ):
        find_method("ipo")
    with pytest.raises(SpecError, match=r"found 'simpo'\. Set method: cpo and loss_type: simpo"):
        find_method("simpo")
    with pytest.raises(SpecError, match=r"^method should be one of .*found 'dppo'\. .*did you mean 'dpo'\?"):
        find_method("dppo")


def test_settings_of_other_methods_may_be_there_if_they_are_null() -> None:
    orpo = find_method("orpo")
    assert orpo.without_others({"beta": 0.2, "loss_type": None, "seed": 3}) == {"beta": 0.2, "seed": 3}
    with pytest.raises(UnknownKeyError, match="'loss_type' is a setting of method dpo, cpo, kto and grpo"):
        orpo.without_others({"loss_type": "ipo"})


def test_null_is_the_default_and_other_spellings_are_known() -> None:
    assert find_method("dpo").settings({"beta": None, "seed": 3}) == DpoSettings()
    assert OrpoSettings(rl_beta=0.3) == OrpoSettings(beta=0.3)
    with pytest.raises(UnknownKeyError, match=r"DpoSettings has the unknown key 'betta'\. Did you mean 'beta'"):
        DpoSettings(betta=1.0)


def test_one_setting_is_judged_whatever_the_others_are() -> None:
    dpo = find_method("dpo")
    dpo.check_setting("label_smoothing", 0.1)
    dpo.check_setting("loss_type", "ipo")
    dpo.check_setting("beta", None)
    with pytest.raises(SpecError, match=r"^beta \(strength of the penalty"):
        dpo.check_setting("beta", 0)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"metrics": ("wins",), "scores": ("win_rate",)}, "metrics .*wins.* and scores .*win_rate"),
        ({"metrics": ("loss",)}, "no metric called 'loss'"),
        ({"settings": dict}, "a subclass of ObjectiveSettings, found <class 'dict'>"),
    ],
)
def test_an_entry_checks_what_it_says(changes: dict[str, object], found: str) -> None:
    with pytest.raises(SpecError, match=found):
        ObjectiveEntry(**{"implementation": "mine:Mine", "settings": ObjectiveSettings, **changes})


def test_labels_without_a_score_are_chosen_by_the_metric() -> None:
    entry = ObjectiveEntry(implementation="mine:Mine", is_paired=False, problem_types=("regression",), metrics=("mse",))
    method = Method(name="mine", entry=entry)
    check_selection("metric", method)
    with pytest.raises(SpecError, match=r"rows have labels and no answers, found 'eval_accuracy'. Remove the key\.$"):
        check_selection("eval_accuracy", method)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("bayes", "a sweep of W&B searches. Put its parameters under 'search_space', and set 'search: tpe'"),
        ("random", "and set 'search: random'"),
        ("rloo", "found 'rloo', which ALTO does not have. Choose one of these methods; grpo also learns from rewards."),
    ],
)
def test_what_other_programs_call_a_method_is_answered(name: str, match: str) -> None:
    with pytest.raises(SpecError, match=re.escape(match)):
        find_method(name)
