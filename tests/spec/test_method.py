"""The names that the spec lists without torch are those of the objectives, which need it."""

from __future__ import annotations

from alto.objectives import find_objective
from alto.objectives.dpo import _LOSSES
from alto.spec.method import LOSS_TYPES, OWN_METHODS, learns_from_pairs


def test_every_method_has_an_objective_and_every_form_of_the_loss_a_formula():
    for method in OWN_METHODS:
        assert find_objective(method).needs_reference == (method == "dpo")
    assert tuple(_LOSSES) == LOSS_TYPES


def test_whose_rows_are_pairs():
    assert [learns_from_pairs(method) for method in ("sft", "dpo", "orpo", "simpo")] == [False, True, True, None]
